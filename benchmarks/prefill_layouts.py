"""Prefill with tokens cut beside prefill with tensors cut, on the same ranks: alternating turns, medians, bytes moved, and the transition.

    mpirun -n 2 python benchmarks/prefill_layouts.py -m MODEL.gguf [-t 1] [-p 512,2048] [-r 5]

Both run in the same processes over the same weights and cache; a turn prefills a prompt and decodes nine tokens. `transition` is how
much longer than the others' median the first of them takes. Bytes are those that all ranks read of one another, per layer and step,
beside the formula: for TOKEN tokens * (ranks - 1) / ranks * (2 heads + 2 kv_heads) * head_dim * 4, for TENSOR tokens * 2 hidden *
ranks * (ranks - 1) * 4.
"""

import argparse
import statistics
import sys
import time

import numpy as np

from ckdist.comm.world import start_world
from ckdist.config import EngineConfig
from ckdist.engine.launch import load_model
from ckdist.engine.single import SingleSequence

DECODED = 9
LAYOUTS = {"TENSOR": sys.maxsize, "TOKEN": 0}  # the executable's prefill_from


def turn(executable, ids) -> tuple[float, float]:
    """Seconds of the prefill and of the transition to decoding."""
    sequence, steps = SingleSequence(executable), []
    begin = time.perf_counter()
    sequence.feed(ids, outputs="last")
    prefill = time.perf_counter() - begin
    for token in range(DECODED):
        begin = time.perf_counter()
        sequence.feed([token], outputs="last")
        steps.append(time.perf_counter() - begin)
    return prefill, steps[0] - statistics.median(steps[1:])


def formulas(spec, ranks: int, tokens: int) -> dict[str, float]:
    by_token = tokens * (ranks - 1) / ranks * 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * 4
    return {"TOKEN": by_token, "TENSOR": tokens * 2 * spec.hidden_size * ranks * (ranks - 1) * 4}


def compare(model, prompts: list[int], rounds: int) -> list[tuple]:
    """On rank 0: (layout, tokens, tokens/s, transition in microseconds) for each prompt and layout."""
    executable, rows = model.executable, []
    for count in prompts:
        ids = np.random.default_rng(count).integers(0, model.spec.vocab_size, count)
        taken = {name: [] for name in LAYOUTS}
        for _ in range(rounds + 1):
            for name, executable.prefill_from in LAYOUTS.items():
                taken[name].append(turn(executable, ids))
        for name, seconds in taken.items():
            prefill, transition = (statistics.median(column) for column in zip(*seconds[1:]))
            rows.append((name, count, count / prefill, transition * 1e6))
    return rows


def bytes_moved(model, name: str, tokens: int) -> float:
    """Of all ranks per layer, in one step without logits; a collective call."""
    executable, world = model.executable, model.world
    executable.times(reset=True)
    if world.rank == 0:
        executable.prefill_from = LAYOUTS[name]
        SingleSequence(executable).feed(np.arange(tokens), outputs="none")
        executable.stop()
    else:
        executable.work()
    return sum(world.gather(executable.times().moved)) / model.spec.num_layers


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
        raise SystemExit("one rank has nothing to cut: run under mpirun -n 2 or more")
    model = load_model(EngineConfig(model=arguments.model, threads=arguments.threads, ctx_size=max(prompts) + DECODED, parallel=1), world)
    executable = model.executable
    tokens = executable.max_tokens
    moved = {name: bytes_moved(model, name, tokens) for name in LAYOUTS}
    if world.rank == 0:
        print(model.prefill.reason)
        for name, formula in formulas(model.spec, world.size, tokens).items():
            print(f"{name}: {moved[name] / 1e6:.3f} MB per layer and step of {tokens} tokens, formula {formula / 1e6:.3f}")
        rows = compare(model, prompts, arguments.rounds)
        for name, count, rate, transition in rows:
            other = next(r for n, c, r, _ in rows if n == "TENSOR" and c == count)
            print(f"{name} {count} tokens: {rate:.1f} tokens/s, {rate / other:.3f} of TENSOR; transition {transition:.0f} us")
    else:
        executable.work()
    model.close()
    world.close()


if __name__ == "__main__":
    main()
