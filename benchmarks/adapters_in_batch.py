"""Tokens per second with adapters in one batch: eight of them, one, and none, in turn. And a server without slots.

python benchmarks/adapters_in_batch.py MODEL [--type F16] [--rank 16] [--sequences 8] [--threads 2]
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import numpy as np

from ckdist import LLM, SamplingParams
from ckdist.models.decoder import weight_shapes
from ckdist.models.moe_weights import is_of_mixture
from ckdist.weights.adapter_file import PREFIX, WEIGHTS, Lora, save_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: pathlib.Path, model: str, rank: int, seed: int, kind: str) -> None:
    """Writes a random adapter of all linears, in F32 or F16."""
    spec, rng, parameters = open_checkpoint(model).spec, np.random.default_rng(seed), {}
    for name, shape in weight_shapes(spec).items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in TARGETS and not is_of_mixture(name):
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                parameters[f"{stem}.lora_{part}.weight"] = 0.01 * rng.standard_normal(size).astype(np.float32)
    save_adapter(folder, Lora(rank, float(rank), TARGETS), model, parameters, spec)
    if kind == "F16":
        tensors = [
            TensorToWrite(PREFIX + name, kind, array.shape, lambda array=array: array.astype(np.float16))
            for name, array in parameters.items()
        ]
        write_safetensors(folder / WEIGHTS, tensors)


def rate(llm: LLM, adapters: list[str | None], tokens: int) -> float:
    """Tokens per second of decoding, one sequence per adapter."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        used = ((adapter, 1.0),) if adapter else ()
        llm.engine.add(number, [5 + number, *range(10, 40)], params, tenant=None, adapters=used)
    counts = 0
    while counts < len(adapters):  # prompts
        counts += sum(bool(output.tokens) for output in llm.engine.step())
    begin, done = time.perf_counter(), 0
    while llm.engine.has_work:
        done += sum(len(output.tokens) for output in llm.engine.step())
    return done / (time.perf_counter() - begin)


def main() -> None:
    """Prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--type", choices=("F32", "F16"), default="F32", help="of the matrices in the files")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        flags = []
        for i in range(given.sequences):
            folder = pathlib.Path(temporary) / f"a{i}"
            write_adapter(folder, given.model, given.rank, i, given.type)
            flags.append(f"m{i}={folder}")
        common = {"threads": given.threads, "parallel": given.sequences, "repack": "off", "ctx_size": 512}
        slots = LLM(given.model, lora=flags, max_lora_rank=max(16, given.rank), **common)
        plain = LLM(given.model, **common)
        fixed = LLM(given.model, lora=flags[0].partition("=")[2], **common)
        names: list[str | None] = [f"m{i}" for i in range(given.sequences)]
        cases = {
            "eight adapters": (slots, names),
            "one adapter": (slots, [names[0]] * given.sequences),
            "one for all requests": (fixed, [None] * given.sequences),
            "none, with slots": (slots, [None] * given.sequences),
            "none, no slots": (plain, [None] * given.sequences),
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(given.rounds):
            for name, (llm, adapters) in cases.items():
                rates[name].append(rate(llm, adapters, given.tokens))
        for name, found in rates.items():
            print(f"{name:22s} {statistics.median(found):8.1f} tokens/s")
        ratio = lambda a, b: statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))
        print(f"eight / one: {ratio('eight adapters', 'one adapter'):.3f}")
        print(f"one / for all: {ratio('one adapter', 'one for all requests'):.3f}")
        print(f"none with slots / without: {ratio('none, with slots', 'none, no slots'):.3f}")


if __name__ == "__main__":
    main()
