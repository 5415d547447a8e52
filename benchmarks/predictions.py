"""Predictions of `ckdist plan` beside measurements on this machine, with signed errors.

    python benchmarks/predictions.py MODEL.gguf... [--quantize q8_0 q4_0] [--machine machine.toml]

The machine is measured first, or read from a file of `ckdist bench machine --save`. Prefill and decode of a model take
turns, and the fastest turn of each counts: other work on a machine can only slow it down.
"""

import argparse
import time

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.plan.cluster import Cluster
from ckdist.plan.machine_spec import MachineSpec, machine_named
from ckdist.plan.predict import Predictor, Way
from ckdist.plan.this_machine import measured

CONTEXT, PROMPT, STEPS, SEQUENCES = 512, 512, 8, 4
TURNS = 6


def seconds(model) -> list[float]:
    """Of a prompt, of a decoded token, and of a step of SEQUENCES sequences: the least of some turns."""
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, CONTEXT, dtype=np.int32)
    found = [float("inf")] * 3
    for _ in range(TURNS):
        single = SingleSequence(model.executable)
        began = time.perf_counter()
        single.feed(ids[:PROMPT], outputs="last")
        found[0] = min(found[0], time.perf_counter() - began)
        for i, count in enumerate((1, SEQUENCES), 1):
            group = LockstepSequences(model.executable, count)
            group.fill(ids)
            steps = group.run(np.zeros((STEPS, count), np.int32))
            next(steps)
            for _ in range(STEPS - 1):
                began = time.perf_counter()
                next(steps)
                found[i] = min(found[i], time.perf_counter() - began)
            list(steps)
    return found


def row(path: str, quantize: str | None, spec: MachineSpec) -> str:
    """The tokens per second of one model, predicted and measured."""
    config = EngineConfig(
        model=path, quantize=quantize, ctx_size=2 * CONTEXT, parallel=SEQUENCES, threads=spec.total_cores, repack="off",
        ubatch_size=PROMPT, batch_size=PROMPT,
    )  # fmt: skip
    model = load_model(config, SingleWorld())
    try:
        took = seconds(model)
    finally:
        model.close()
    p = Predictor(model.checkpoint, Cluster(spec, ranks=1), Way("tensor"), PROMPT, quantize)
    expected = [p.prefill(PROMPT).seconds, *(p.decode(count, CONTEXT).seconds for count in (1, SEQUENCES))]
    cells = [
        f"{count / one:.4g} / {count / other:.4g} / {100 * (other / one - 1):+.0f} %"
        for count, one, other in zip((PROMPT, 1, SEQUENCES), expected, took, strict=True)
    ]
    return f"| {model.checkpoint.path.stem} {quantize or ''} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--quantize", nargs="*", default=[])
    parser.add_argument("--machine")
    words = parser.parse_args()
    spec = machine_named(words.machine) if words.machine else measured(SingleWorld())
    assert spec is not None  # on rank 0
    print(f"predicted / measured tokens/s / error: {spec.name}")
    print(f"| model | prefill of {PROMPT} | decode, 1 sequence | decode, {SEQUENCES} sequences |\n|---|---|---|---|")
    for path in words.models:
        for quantize in (None, *words.quantize):
            print(row(path, quantize, spec), flush=True)


if __name__ == "__main__":
    main()
