"""Predictions of `ckdist plan` beside measurements on this machine, with signed errors.

    python benchmarks/predictions.py MODEL.gguf... [--quantize q8_0 q4_k] [--threads N]

Each turn measures the machine as `ckdist bench machine` does, then steps of the model. So both see the same other work.
A cell has the medians of predicted and measured tokens/s, the median error of a turn, and the smallest and the largest.
"""

import argparse
import statistics
import time

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.plan.cluster import Cluster
from ckdist.plan.machine_spec import FORMATS
from ckdist.plan.predict import Predictor, Question, Way
from ckdist.plan.this_machine import measure_machine
from ckdist.topology import this_machine
from ckdist.weights import dtypes
from ckdist.weights.loader import planned_type

CONTEXT, PROMPT, STEPS, SEQUENCES = 512, 512, 16, (1, 4)
KINDS = f"prefill of {PROMPT}", *(f"decode, {count} sequences" for count in SEQUENCES)


def measured_rates(model: Model) -> list[float]:
    """Tokens per second of a prompt, and of steps of SEQUENCES sequences."""
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, CONTEXT, dtype=np.int32)
    began = time.perf_counter()
    SingleSequence(model.executable).feed(ids[:PROMPT], outputs="last")
    found = [PROMPT / (time.perf_counter() - began)]
    for count in SEQUENCES:
        group = LockstepSequences(model.executable, count)
        group.fill(ids)
        steps = group.run(np.zeros((STEPS, count), np.int32))
        next(steps)
        began = time.perf_counter()
        found.append((STEPS - 1) * count / (sum(1 for _ in steps) and time.perf_counter() - began))
    return found


def row(path: str, quantize: str | None, threads: int, turns: int) -> str:
    """The cells of one model."""
    config = EngineConfig(
        model=path, quantize=quantize, ctx_size=2 * CONTEXT, parallel=max(SEQUENCES), threads=threads, repack="off",
        ubatch_size=PROMPT, batch_size=PROMPT,
    )  # fmt: skip
    model, pairs = load_model(config, SingleWorld()), []
    matrices = {name: tensor for name, tensor in model.checkpoint.tensors.items() if len(tensor.shape) > 1}
    numbers = {planned_type(name, tensor, quantize) for name, tensor in matrices.items()}
    numbers |= {dtypes.BY_NAME[name].number for name in FORMATS}
    try:
        for _ in range(turns):
            spec = measure_machine(this_machine(), [dtypes.BY_NUMBER[number] for number in sorted(numbers)])
            found = measured_rates(model)
            cluster = Cluster(spec, 1, threads, 1)
            question = Question(model.checkpoint, cluster, CONTEXT, ubatch_size=PROMPT, quantize=quantize)
            p = Predictor(question, Way("tensor"))
            expected = [p.prefill(PROMPT).tokens, *(p.decode(count, CONTEXT).tokens for count in SEQUENCES)]
            pairs.append(list(zip(expected, found, strict=True)))
    finally:
        model.close()
    cells = []
    for kind in zip(*pairs, strict=True):
        expected, found = (statistics.median(side) for side in zip(*kind, strict=True))
        errors = sorted(100 * (a / b - 1) for a, b in kind)
        cells.append(
            f"{expected:.4g} / {found:.4g} / {statistics.median(errors):+.0f} % ({errors[0]:+.0f} to {errors[-1]:+.0f})"
        )
    return f"| {model.checkpoint.path.stem} {quantize or ''} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--quantize", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    words = parser.parse_args()
    print(f"predicted / measured tokens/s / error: {this_machine().model}")
    print(f"| model | {' | '.join(KINDS)} |\n|---|---|---|---|")
    for path in words.models:
        for quantize in (None, *words.quantize):
            print(row(path, quantize, words.threads, words.turns), flush=True)


if __name__ == "__main__":
    main()
