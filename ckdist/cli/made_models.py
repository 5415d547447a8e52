"""Small models with random weights for calibration, and the steps to measure with each. Measures nothing."""

import contextlib
import json
import math
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.planning.step_shape import StepShape
from ckdist.topology import this_machine
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
# Common widths and heads. Prompts of wider or narrower models take a few percent more or less.
WIDE = {
    **COMMON, "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4608, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 4,
}  # fmt: skip
MIXTURE = DENSE | {
    "model_type": "qwen3_moe", "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "num_hidden_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 640,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
BYTE_TYPES = "Q8_0", "Q4_K"
GROUPED = DENSE | {"num_hidden_layers": 1, "num_key_value_heads": 2}  # heads share keys and values in larger groups
TYPES = {"plain": None, "Q8_0": "q8_0", "Q4_K": "q4_k"}  # --quantize of the dense models
SAME = {"plain": 1, "Q8_0": 2, "Q4_K": 4}  # layers for equal bytes
DEPTHS = "same", "dense", "deep"  # of dense models: more layers, more bytes between two uses of a weight
LEAST, FAR = "plain", "Q4_K"  # types whose key-value cache is measured too: of one layer, and of the deep model
SHORT, LONG = 32, 1024  # tokens of context
FEW, SOME, MANY = 4, 64, 512  # rows of products: of a decode batch, and of prompts
ALONE, BEHIND = StepShape.decode(1, SHORT), StepShape.decode(1, LONG)
TOGETHER, ALL_BEHIND = StepShape.decode(FEW, SHORT), StepShape.decode(FEW, LONG)
PROMPTED, PIECE = StepShape.prompt(MANY), StepShape.prompt(SOME)
# Name -> (config, --quantize, steps to measure).
MADE: Mapping[str, tuple[Mapping[str, Any], str | None, tuple[StepShape, ...]]] = {
    "plain": (WIDE, None, (ALONE, PIECE, PROMPTED)),
    "Q8_0": (WIDE, "q8_0", (ALONE, PIECE, PROMPTED)),
    "Q4_K": (WIDE, "q4_k", (ALONE, PIECE, PROMPTED)),
    "latent": (LATENT, None, (PROMPTED,)),
    "latent Q8_0": (LATENT, "q8_0", (PROMPTED,)),
    "mixture": (MIXTURE, None, (PROMPTED,)),
    "mixture Q4_K": (MIXTURE, "q4_k", (ALONE, PROMPTED)),
}
FOLDERS = {
    "dense": DENSE, "wide": WIDE, "latent": LATENT, "mixture": MIXTURE, "grouped": GROUPED,
    **{f"{layers} layers": DENSE | {"num_hidden_layers": layers} for layers in SAME.values()},
}  # fmt: skip
# Steps to measure with nothing read in between, by name of MADE, of a folder, or of a type and depth.
NEAR_STEPS = {
    "latent Q8_0": (ALONE, TOGETHER), "grouped": (BEHIND,),
    **{f"{name} {depth}": (ALONE, TOGETHER) for name in TYPES for depth in DEPTHS},
    **dict.fromkeys((f"{LEAST} same", "latent"), (ALONE, TOGETHER, BEHIND)),
    f"{FAR} deep": (ALONE, TOGETHER, BEHIND, ALL_BEHIND),
}  # fmt: skip
EVICTED = 1.5  # bytes between two uses of a weight that comes from memory, as a multiple of the machine's caches
LEAST_LAYERS, MOST_LAYERS = 8, 32  # of the deep model, whose weights are EVICTED times the caches within these bounds
NEAR = " near"  # suffix of a name: nothing is read between its steps

IN_MEMORY, ROOM = pathlib.Path("/dev/shm"), 3 << 30  # noqa: S108, a file system in memory; bytes that must be free


@contextlib.contextmanager
def made_models(world: World) -> Iterator[pathlib.Path]:
    """Yields a folder with the models' files, which is removed afterwards. A collective call.

    The folder is in memory if there is room.
    """
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="ckdist-", dir=_memory()) if world.rank == 0 else None
        folder = stack.enter_context(temporary) if temporary is not None else None
        parent = pathlib.Path(world.broadcast(folder))
        if world.rank == 0:
            deep = DENSE | {"num_hidden_layers": deep_layers(cache_bytes())}
            for name, config in {**FOLDERS, "deep": deep}.items():
                write_model(parent / name, config)
        world.gather(None)  # a barrier: the files are written
        yield parent
        world.gather(None)  # a barrier: all ranks are done with the files


def _memory() -> str | None:
    """A folder in memory if it has room for the models. None: the default temporary folder."""
    try:
        return str(IN_MEMORY) if shutil.disk_usage(IN_MEMORY).free > ROOM else None
    except OSError:
        return None


def made_cases() -> Iterator[tuple[str, str, str | None, Sequence[StepShape]]]:
    """Yields (name, folder, --quantize, steps of MADE) of all models to measure."""
    for name, (config, quantize, shapes) in MADE.items():
        yield name, next(folder for folder, each in FOLDERS.items() if each is config), quantize, shapes
    yield "grouped", "grouped", None, ()
    for name, kind in TYPES.items():
        for depth in DEPTHS:
            yield f"{name} {depth}", f"{SAME[name]} layers" if depth == "same" else depth, kind, ()


def deep_layers(caches: float) -> int:
    """Returns the layers for which a step of the deep model reads EVICTED times `caches` bytes."""
    each = sum(
        math.prod(shape) for name, shape in _shapes(DENSE | {"num_hidden_layers": 1}).items() if "layers" in name
    )
    return int(np.clip(math.ceil(EVICTED * caches / (2 * each)), LEAST_LAYERS, MOST_LAYERS))


def cache_bytes() -> int:
    """Returns the bytes of the last-level caches, at most a sixteenth of the available memory."""
    machine = this_machine()
    caches = len({cpu.l3 for cpu in machine.cpus}) * machine.l3_bytes
    return min(caches, native.lib.ckdist_available_memory() // 16)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return weight_shapes(spec_from_config(config, "the calibration's model"))


def write_model(folder: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
    """Writes a model with random bfloat16 weights to `folder`, and returns `folder`."""
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
    """Names and shapes of the file's tensors. Latent attention stores keys and values of a head in one tensor."""
    for name, shape in shapes.items():
        if name.endswith("k_b_proj.weight"):
            keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
            rows = config["num_attention_heads"] * (keys + values)
            yield name.replace("k_b_proj", "kv_b_proj"), (rows, config["kv_lora_rank"])
        elif not name.endswith("v_b_proj.weight"):
            yield name, shape


__all__ = ["cache_bytes", "deep_layers", "made_cases", "made_models", "write_model"]
