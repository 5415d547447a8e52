"""Token-parallel prefill beside tensor-parallel prefill, on the same ranks: alternating turns, medians, bytes moved,
and the transition.

    mpirun -n 2 python benchmarks/prefill_layouts.py -m MODEL.gguf [-t 1] [-p 512,2048] [-r 5]

Both run in the same processes over the same weights and cache, in turn. Then turns that also decode nine tokens are
traced: `gap` is from the end of a prompt's last step to the first decode step's first work, on each rank, and
`transition` what of it is more than the median gap between two decode steps. Bytes are those that all ranks read of one
another, per layer and step, beside the formula: for TOKEN tokens * (ranks - 1) / ranks * (2 heads + 2 kv_heads) *
head_dim * 4, for TENSOR tokens * 2 hidden * ranks * (ranks - 1) * 4.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.engine.trace import Trace

DECODED, TURNS, PROMPT = 9, 12, 64  # of what is traced
LAYOUTS = {"TENSOR": sys.maxsize, "TOKEN": 0}  # the executable's prefill_from


def prefill(executable, ids) -> tuple[float, SingleSequence]:
    """Seconds of a prompt, and its sequence."""
    sequence = SingleSequence(executable)
    begin = time.perf_counter()
    sequence.feed(ids, outputs="last")
    return time.perf_counter() - begin, sequence


def formulas(spec, ranks: int, tokens: int) -> dict[str, float]:
    by_token = tokens * (ranks - 1) / ranks * 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * 4
    return {"TOKEN": by_token, "TENSOR": tokens * 2 * spec.hidden_size * ranks * (ranks - 1) * 4}


def compare(model, prompts: list[int], rounds: int) -> None:
    """On rank 0: prints tokens/s of either way, and the median ratio over rounds."""
    executable = model.executable
    for count in prompts:
        ids = np.random.default_rng(count).integers(0, model.spec.vocab_size, count)
        taken = {name: [] for name in LAYOUTS}
        for turn in range(rounds + 1):
            for name in list(LAYOUTS)[:: 1 if turn % 2 else -1]:
                executable.prefill_from = LAYOUTS[name]
                taken[name].append(prefill(executable, ids)[0])
        ratios = [tensor / token for token, tensor in zip(taken["TOKEN"][1:], taken["TENSOR"][1:], strict=True)]
        token, tensor = (count / statistics.median(taken[name][1:]) for name in ("TOKEN", "TENSOR"))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds"
        print(
            f"{count} tokens: TOKEN {token:.1f} tokens/s, TENSOR {tensor:.1f}, ratio "
            f"{statistics.median(ratios):.3f} ({spread})",
            flush=True,
        )


def bytes_moved(model, name: str, tokens: int) -> float:
    """Of all ranks per layer, in one step without logits; a collective call."""
    executable, world = model.executable, model.world
    executable.stats(reset=True)
    if world.rank == 0:
        executable.prefill_from = LAYOUTS[name]
        SingleSequence(executable).feed(np.arange(tokens), outputs="none")
        executable.stop()
    else:
        executable.work()
    return sum(world.gather(executable.stats().moved)) / model.spec.num_layers


def record(model, path: str) -> None:
    """Traces turns of a prompt and decoding, either way in turn, to `path`; a collective call that closes the model."""
    executable = model.executable
    model.trace = Trace(path, model.world, executable.threads)
    executable.trace(model.trace.handle)
    if model.world.rank:
        executable.work()
    else:
        for _ in range(TURNS):
            for executable.prefill_from in LAYOUTS.values():
                _, sequence = prefill(executable, np.arange(PROMPT))
                for token in range(DECODED):
                    sequence.feed([token], outputs="last")
    model.close()


def transitions(path: str) -> None:
    """Prints what the trace says of the gaps between steps."""
    lanes = {}
    for event in json.loads(pathlib.Path(path).read_text())["traceEvents"]:
        if event.get("cat") == "batch" and event["name"] in ("prefill by tokens", "prefill by tensors", "decode"):
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for (rank, _), events in sorted(lanes.items()):
        gaps = {}
        for before, after in itertools.pairwise(events):
            if after["name"] == "decode":
                gaps.setdefault(before["name"], []).append(after["ts"] - before["ts"] - before["dur"])
        median = {name: statistics.median(values) for name, values in gaps.items()}
        for name in sorted(median.keys() - {"decode"}):
            between = f"gap {median[name]:.1f} us, between decode steps {median['decode']:.1f} us"
            print(
                f"rank {rank}, {name}: {between}, transition {median[name] - median['decode']:.1f} us "
                f"({len(gaps[name])} turns)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-p", "--n-prompt", default="512,2048")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    arguments = parser.parse_args()
    prompts = [int(n) for n in arguments.n_prompt.split(",")]
    world = start_world()
    if world.size == 1:
        raise SystemExit("one rank has nothing to shard: run under mpirun -n 2 or more")
    model = load_model(
        EngineConfig(
            model=arguments.model, threads=arguments.threads, ctx_size=max([*prompts, PROMPT + DECODED]), parallel=1
        ),
        world,
    )
    executable = model.executable
    tokens = min(executable.max_tokens, executable.context_length)
    moved = {name: bytes_moved(model, name, tokens) for name in LAYOUTS}
    if world.rank == 0:
        print(model.prefill.reason)
        for name, formula in formulas(model.spec, world.size, tokens).items():
            print(
                f"{name}: {moved[name] / 1e6:.3f} MB per layer and step of {tokens} tokens, formula {formula / 1e6:.3f}"
            )
        compare(model, prompts, arguments.rounds)
        executable.stop()
    else:
        executable.work()
    with tempfile.TemporaryDirectory() as folder:
        path = world.broadcast(f"{folder}/trace.json")
        record(model, path)
        if world.rank == 0:
            transitions(path)
    world.close()


if __name__ == "__main__":
    main()
