"""LoRA (Hu et al. 2021, arXiv:2106.09685): the base stays as it is, low-rank matrices beside chosen linear layers are
trained.

The forward is the model's own, traced with linears that add the low-rank path, so the base may have any type that
multiplies.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ckdist.layout import Dim, Layout, Mesh
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import TrainingTracer
from ckdist.train.checkpoint import write_synced
from ckdist.train.initial import generator_of
from ckdist.weights.lora import CONFIG, PREFIX, WEIGHTS, Lora
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors


def initial_matrix(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A: uniform within 1 / sqrt(inputs), as PEFT; B: zeros, so that training starts from the base."""
    if ".lora_B." in name:
        return np.zeros(shape, np.float32)
    bound = shape[1] ** -0.5
    return generator_of(name, seed).uniform(-bound, bound, shape).astype(np.float32)


class LoraTracer(TrainingTracer):
    """Traces w x + scale * B (A x) where the forward says w x of a target."""

    def __init__(self, lora: Lora, layout: Layout, mesh: Mesh) -> None:
        """`lora`: which linears get the path, and of what rank."""
        super().__init__(layout, mesh)
        self.lora = lora

    def linears(
        self, x: Value, weights: Sequence[Weight], bias: Sequence[Weight] = (), names: Sequence[str] | None = None
    ) -> tuple[Value, ...]:
        """W x + scale * B (A x) for each weight that is a target."""
        outputs = list(super().linears(x, weights, bias, names))
        rank = Dim("lora", self.lora.rank)
        for index, w in enumerate(weights):
            stem = w.name.removesuffix(".weight")
            if stem.rpartition(".")[2] in self.lora.targets:
                a, b = (
                    Weight(f"{stem}.lora_A.weight", (rank, w.dims[1])),
                    Weight(f"{stem}.lora_B.weight", (w.dims[0], rank)),
                )
                low = self.scale(self._product(x, a, "lora_a"), self.lora.scale)  # (tokens, rank)
                outputs[index] = self.add(outputs[index], self._product(low, b, "lora_b"))
        return tuple(outputs)

    def _product(self, x: Value, weight: Weight, name: str) -> Value:
        """X times one weight, without a path of its own."""
        return super().linears(x, (weight,), (), (name,))[0]


def save_adapter(folder: Path, lora: Lora, base: str, parameters: Mapping[str, np.ndarray]) -> None:
    """adapter_config.json and adapter_model.safetensors as PEFT reads them; `parameters` by their names in the
    program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    tensors = [
        TensorToWrite(PREFIX + name, "F32", array.shape, lambda array=array: array)
        for name, array in parameters.items()
    ]
    write_safetensors(folder / f"{WEIGHTS}.tmp", tensors, {"format": "pt"})
    (folder / f"{WEIGHTS}.tmp").replace(folder / WEIGHTS)
    write_synced(folder / f"{CONFIG}.tmp", (json.dumps(config, indent=2) + "\n").encode())
    (folder / f"{CONFIG}.tmp").replace(folder / CONFIG)
