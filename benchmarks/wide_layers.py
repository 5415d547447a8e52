"""Layers of published widths with random weights: the CPU time of one thread for a decode step and for a chunk of a
prompt after 1,024 and 65,536 tokens of context, the bytes that a decode step reads, and their share of the bandwidth
that the thread measures in turns.

    python benchmarks/wide_layers.py FOLDER [--shapes kimi-k2 nemotron-h …] [-c 1024 65536]

A shape is a published configuration with few layers, a small vocabulary and 16 experts: a token reads as many bytes as
it would with all experts. Its weights are made in FOLDER if they are not there (1 to 3 GB each) and packed as Q4_K.

Bytes of a step: matrices as packed (of experts: those that a token takes), states twice (they are read and written),
and rows of the cache. Sparse attention reads the index of all positions and the chosen rows.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.models.spec import MoeFfn
from ckdist.program.cache import LayerCache, cache_bytes, slot_bytes
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots
from ckdist.topology.bandwidth import read_bandwidth
from ckdist.train.stored_tensors import stored_tensors
from ckdist.weights import dtypes
from ckdist.weights.loader import planned_type
from ckdist.weights.safetensors_writer import TensorToWrite, as_stored, write_safetensors

CONFIGS = pathlib.Path(__file__).parent.parent / "tests/golden/configs"
VOCAB, EXPERTS, PIECE = 512, 16, 512
TYPES = "i16", "i16"  # of the cache, the default
FEW = {"vocab_size": VOCAB, "max_position_embeddings": 1 << 17}
ROUTED = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
NO_YARN = {"rope_scaling": None, "quantization_config": None}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # the folder of the published configuration, and changes to it
    "kimi-k2": ("kimi_k2", FEW | ROUTED | NO_YARN | {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
    "deepseek-v3.2": ("deepseek_v32", FEW | ROUTED | NO_YARN | {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "deepseek-v4": (
        "deepseek_v4",
        FEW
        | {"n_routed_experts": 8, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 0}
        | {"num_nextn_predict_layers": 0, "quantization_config": None, "expert_dtype": None},
    ),
    "kimi-linear": (
        "kimi_linear",
        FEW | {"num_experts": EXPERTS, "num_hidden_layers": 4, "first_k_dense_replace": 0, "model_max_length": 1 << 17},
    ),
    "kimi-k3": ("kimi_k3", {}),
    "nemotron-h": ("nemotron_h_8b", FEW | {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}),
    "falcon-mamba": ("falcon_mamba", FEW | {"num_hidden_layers": 2}),
    "jamba": ("jamba", FEW | {"num_hidden_layers": 1, "num_experts": 2}),
    "minimax-m3": ("minimax_m3", {}),
}
NESTED: dict[str, dict[str, dict[str, Any]]] = {  # changes to a part of a configuration
    "kimi-linear": {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}},
    "kimi-k3": {
        "text_config": FEW
        | {"num_hidden_layers": 2, "num_experts": EXPERTS, "first_k_dense_replace": 0, "quantization_config": None},
    },
    "minimax-m3": {
        "text_config": FEW
        | {"num_hidden_layers": 1, "num_local_experts": 8, "moe_layer_freq": [1]}
        | {"num_mtp_modules": 0, "num_nextn_predict_layers": 0},
    },
}


def config_of(shape: str) -> dict[str, Any]:
    """Returns the contents of the shape's config.json."""
    folder, changes = SHAPES[shape]
    config = json.loads((CONFIGS / folder / "published.json").read_text()) | changes
    for part, changed in NESTED.get(shape, {}).items():
        config[part] |= changed
    if shape == "kimi-k3":
        config["text_config"]["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    if shape == "minimax-m3":
        config["text_config"]["sparse_attention_config"] |= {
            "sparse_attention_freq": [1], "sparse_disable_index_value": [1],
        }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None or name not in NO_YARN}


def write(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Writes a model of `config` whose matrices have numbers of about 0.02."""
    rng, spec = np.random.default_rng(1), spec_from_config(config, "config.json")
    pool = (rng.standard_normal(1 << 22, np.float32) * 0.02).astype(np.float16)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.ones(shape, np.float16) if "norm" in name else np.resize(np.roll(pool, rng.integers(1 << 22)), shape)

    weights = {name: values(name, shape) for name, shape in weight_shapes(spec).items()}
    tensors = [
        TensorToWrite(t.name, "BF16", t.shape, lambda t=t: as_stored(t.values(), "BF16"))
        for t in stored_tensors(spec, weights)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))


def weight_bytes(model: Model) -> int:
    """Returns the bytes of matrices that one token reads."""
    used = max((1, *(layer.ffn.routing.used for layer in model.spec.layers if isinstance(layer.ffn, MoeFfn))))
    total = 0.0
    for name, source in model.checkpoint.tensors.items():
        if len(source.shape) < 2 or "embed" in name:
            continue
        kind = dtypes.BY_NUMBER[planned_type(name, source, "q4_k")]
        part = used / source.shape[0] if len(source.shape) > 2 else 1
        total += part * np.prod(source.shape) * kind.block_bytes / kind.block_elements
    return int(total)


def token_bytes(layer: LayerCache, names: tuple[str, ...]) -> float:
    """Returns the bytes of these arrays for one position."""
    arrays = tuple(array for array in layer.arrays if array.name in names)
    return cache_bytes(replace(layer, arrays=arrays), "token", TYPES) / BLOCK_TOKENS if arrays else 0


def cached_bytes(model: Model, positions: int) -> float:
    """Returns the bytes of caches and states that a decode step reads or writes."""
    layers = list(model.executable.caches.values())
    total = 2.0 * slot_bytes(layers)
    for layer in layers:
        sparse = any(array.name == "index" for array in layer.arrays)
        rows = min(positions, 2048) if sparse else positions
        total += positions * token_bytes(layer, ("index",))
        window = min(rows, 128) if any(array.name == "rows" for array in layer.arrays) else rows
        total += window * token_bytes(layer, ("keys", "values", "latent", "rope"))
        entries = positions * token_bytes(layer, ("entries",))
        chosen = 512 * 2 * 512 if any(array.name == "index_entries" for array in layer.arrays) else entries
        total += min(entries, chosen) + positions * token_bytes(layer, ("index_entries",))
    return total


def run(model: Model, tokens: int, start: int, fill: bool = False) -> float:
    """Returns the CPU seconds of a step of `tokens` tokens after `start` tokens. With `fill` the state moves on."""
    executable = model.executable
    end = start + tokens
    blocks = np.arange(-(-end // BLOCK_TOKENS), dtype=np.int32)
    ids = np.random.default_rng(end).integers(0, VOCAB, tokens).astype(np.int32)
    rows = np.arange(0 if fill else tokens, dtype=np.int32)  # a step without logits ends before its last layer's FFN
    slots = own_slots(executable.state_slots, range(1), start)
    if slots is not None and not fill:
        slots[:, 1] = 1
    batch = Batch(ids, np.array([[tokens, start, len(blocks)]], np.int32), blocks, rows, slots)
    begin = time.process_time()
    executable.run(batch)
    return time.process_time() - begin


def measure(shape: str, model: Model, contexts: list[int], rounds: int) -> None:
    """Prints a line for decode and one for prompts at each context."""
    weights, filled = weight_bytes(model), 0
    for context in sorted(contexts):
        for start in range(filled, context, PIECE):
            run(model, PIECE, start, fill=True)
        filled = context
        shares, steps, prompts = [], [], []
        count = weights + cached_bytes(model, context)
        for _ in range(rounds):
            rate = read_bandwidth(1, repeats=16)
            step = min(run(model, 1, context) for _ in range(12))
            prompts.append(run(model, PIECE, context))
            shares.append(count / step / rate), steps.append(step)
        print(
            f"{shape}, {context} tokens: decode {1e3 * statistics.median(steps):.2f} ms, {count / 1e6:.0f} MB "
            f"({weights / 1e6:.0f} MB of weights), {100 * statistics.median(shares):.0f} % of the bandwidth; "
            f"{PIECE} tokens {1e3 * statistics.median(prompts):.0f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("-c", "--contexts", nargs="+", type=int, default=[1024, 65536])
    parser.add_argument("-r", "--rounds", type=int, default=5)
    args = parser.parse_args()
    for shape in args.shapes:
        folder = args.folder / shape
        if not (folder / "config.json").exists():
            write(folder, config_of(shape))
        config = EngineConfig(
            model=str(folder), threads=1, ctx_size=2 * max(args.contexts) + 2 * PIECE, parallel=2,
            ubatch_size=PIECE, quantize="q4_k", cache_type_k=TYPES[0], cache_type_v=TYPES[1],
        )  # fmt: skip
        model = load_model(config, SingleWorld())
        measure(shape, model, args.contexts, args.rounds)
        model.close()


if __name__ == "__main__":
    main()
