"""The part of a machine's figures that kernels alone do not show: what memory, attention and row steps reach inside of
whole steps, fitted to two models that are made up here and are in no catalogue.

Each figure has one measurement that depends on it the most; they are solved for in turn, and what is predicted for
these models is then what was measured.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckdist import native
from ckdist.comm.world import SingleWorld
from ckdist.config import EngineConfig
from ckdist.engine.launch import Model, load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import CostModel, StepShape
from ckdist.planning.machine import MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.topology import this_machine
from ckdist.topology.bandwidth import node_cpus, read_bandwidth, read_size
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.safetensors_writer import TensorToWrite, as_stored, write_safetensors

COMMON = {"vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
DENSE = {
    **COMMON, "model_type": "llama", "hidden_size": 1280, "intermediate_size": 3840, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 96, "num_hidden_layers": 6,
}  # fmt: skip
LATENT = {
    **COMMON, "model_type": "deepseek_v3", "hidden_size": 1280, "intermediate_size": 2560, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 4, "first_k_dense_replace": 4, "kv_lora_rank": 384,
    "q_lora_rank": 512, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 96, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SHORT, LONG = 32, 1024  # tokens of context
PROMPTS = 128, 512
STEPS, TURNS, READS = 8, 3, 3
MOST_READ = 256 << 20  # bytes
PASSES = 3  # of solving for all figures
MOST_LAYERS, CACHES = 16, 1.0  # so many times the machine's caches the weights have at least


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one model: median seconds of steps by shape, bytes per second that memory gave meanwhile, and its costs."""

    times: Mapping[StepShape, float]
    bandwidth: float
    cost: CostModel

    def solved(self, spec: MachineSpec, name: str, bounds: tuple[float, float], shape: StepShape) -> MachineSpec:
        """The machine with the figure for which a step takes as long as was measured, by bisection; at its bounds, the
        nearest.
        """
        core = max(spec.core_bandwidth, self.bandwidth / spec.cores)
        now = dataclasses.replace(spec, bandwidth=self.bandwidth, core_bandwidth=core)
        taken = lambda value: self.cost.on(dataclasses.replace(now, **{name: value})).step(shape).total
        low, high = bounds
        grows = taken(high) > taken(low)
        for _ in range(40):
            middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
            if (taken(middle) < self.times[shape]) == grows:
                low = middle
            else:
                high = middle
        return dataclasses.replace(spec, **{name: high if low == bounds[0] else low})


def calibrated(spec: MachineSpec) -> MachineSpec:
    """The machine with what whole steps reach of its bandwidth, attention and elementwise rate."""
    one, prompt = StepShape.decode, StepShape.prompt
    with tempfile.TemporaryDirectory(prefix="ckdist-") as folder:
        dense = _write(pathlib.Path(folder) / "dense", DENSE | {"num_hidden_layers": _layers(spec)})
        plain, quantised = _measured(spec, dense, None), _measured(spec, dense, "q4_k")
        for _ in range(PASSES):
            spec = plain.solved(spec, "achieved_bandwidth", (0.05, 1.0), one(1, SHORT))
            spec = quantised.solved(spec, "overlap_loss", (0.0, 4.0), one(1, SHORT))
            spec = plain.solved(spec, "attention_one", (1e6, 1e13), one(1, LONG))
            spec = plain.solved(spec, "elementwise", (1e6, 1e11), prompt(PROMPTS[0]))
            spec = plain.solved(spec, "attention", (1e7, 1e13), prompt(PROMPTS[1]))
        latent = _measured(spec, _write(pathlib.Path(folder) / "latent", LATENT), None)
        spec = latent.solved(spec, "latent_one", (1e6, 1e13), one(1, LONG))
        return latent.solved(spec, "latent", (1e6, 1e13), prompt(PROMPTS[1]))


def _layers(spec: MachineSpec) -> int:
    """So many that the weights do not stay in caches, as far as memory allows."""
    machine = this_machine()
    caches = len({cpu.l3 for cpu in machine.cpus}) * machine.l3_bytes
    each = 2 * sum(math.prod(shape) for name, shape in _shapes(DENSE).items() if ".layers.0." in name)
    room = native.lib.ckdist_available_memory() / 16
    least = int(DENSE["num_hidden_layers"])
    return max(least, min(MOST_LAYERS, int(min(CACHES * caches, room, spec.memory / 16) / each)))


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all weights of a model."""
    return weight_shapes(spec_from_config(config, "the calibration's model"))


def _write(folder: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
    """A folder with a model of random weights in bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = list(_stored(config, _shapes(config)))
    most = max(math.prod(shape) for _, shape in stored)
    drawn = as_stored(0.02 * np.random.default_rng(0).standard_normal(most, np.float32), "BF16")  # (elements,)
    values = lambda shape: lambda: drawn[: math.prod(shape)].reshape(shape)
    tensors: Iterator[TensorToWrite] = (TensorToWrite(name, "BF16", shape, values(shape)) for name, shape in stored)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _stored(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a file's tensors: of latent attention keys and values of a head are stored together."""
    for name, shape in shapes.items():
        if name.endswith("k_b_proj.weight"):
            keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
            rows = config["num_attention_heads"] * (keys + values)
            yield name.replace("k_b_proj", "kv_b_proj"), (rows, config["kv_lora_rank"])
        elif not name.endswith("v_b_proj.weight"):
            yield name, shape


def _measured(spec: MachineSpec, folder: pathlib.Path, quantize: str | None) -> Measured:
    """Median seconds of steps of the shapes that figures are solved for."""
    config = EngineConfig(
        model=str(folder), ctx_size=LONG + 2 * STEPS, parallel=1, repack="off", threads=spec.total_cores,
        quantize=quantize,
    )  # fmt: skip
    checkpoint, one = open_checkpoint(folder), Cluster(spec, ranks=1)
    cost = Predictor(checkpoint, one, Way("tensor"), quantize=quantize).stages[0].costs[0]
    model = load_model(config, SingleWorld())
    try:
        times, reads = {StepShape.prompt(tokens): _prompt(model, tokens) for tokens in PROMPTS}, [_bandwidth()]
        for context in (SHORT, LONG):
            times[StepShape.decode(1, context)] = _decode(model, context)
            reads.append(_bandwidth())
    finally:
        model.close()
    return Measured(times, statistics.median(reads), cost)


def _bandwidth() -> float:
    """Bytes per second that a node's memory gives at this moment."""
    machine = this_machine()
    cpus = next(iter(node_cpus(machine).values()))
    return read_bandwidth(len(cpus), cpus, READS, min(read_size(machine, cpus), MOST_READ) // len(cpus))


def _prompt(model: Model, tokens: int) -> float:
    """Median seconds of a prompt, of one step."""
    took, ids = [], np.zeros(tokens, np.int32)
    for _ in range(TURNS + 1):
        sequence = SingleSequence(model.executable)
        began = time.perf_counter()
        sequence.feed(ids, outputs="last")
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _decode(model: Model, context: int) -> float:
    """Median seconds of a decoded token behind so many others."""
    sequence, took = LockstepSequences(model.executable, 1), []
    begin = context - STEPS // 2
    sequence.fill(np.zeros(begin, np.int32))
    for _ in range(TURNS + 1):
        sequence.length = begin
        began = time.perf_counter()
        for _logits in sequence.run(np.zeros((STEPS, 1), np.int32)):
            pass
        took.append((time.perf_counter() - began) / STEPS)
    return statistics.median(took[1:])


__all__ = ["calibrated"]
