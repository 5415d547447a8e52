"""The gain of drafts as `ckdist plan` predicts it, and as the measured steps of this machine give it.

    python benchmarks/draft_predictions.py MODEL.gguf [--threads 1] [--acceptance 0.9 0.7 0.5]

Each turn measures the machine, then steps with 1 to 9 rows of one sequence. So both see the same other work. Guesses
take no time, as those from earlier text. A wrong gain shows which step is predicted wrongly.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.engine.single import SingleSequence
from ckdist.plan.cluster import Cluster
from ckdist.plan.machine_spec import FORMATS
from ckdist.plan.predict import Predictor, Question, Way
from ckdist.plan.step_shape import Chunks, StepShape
from ckdist.plan.this_machine import measure_machine
from ckdist.topology import this_machine
from ckdist.weights import dtypes
from ckdist.weights.loader import planned_type

CONTEXT, STEPS, ROWS = 256, 24, (1, 2, 3, 4, 5, 7, 9)


def measured(model: Model, clock: Callable[[], float]) -> list[float]:
    """The median seconds of a step for each of ROWS."""
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, 2 * CONTEXT, dtype=np.int32)
    sequence = SingleSequence(model.executable)
    sequence.feed(ids[:CONTEXT], outputs="last")
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(STEPS):
        for rows in ROWS:
            sequence.length = CONTEXT  # the positions after it are written again
            begin = clock()
            sequence.feed(ids[CONTEXT : CONTEXT + rows])
            seconds[rows].append(clock() - begin)
    return [statistics.median(values) for values in seconds.values()]


def gain(seconds: list[float], acceptance: float) -> tuple[float, int]:
    """The largest gain over steps with one row, and its drafted tokens."""
    right = [sum(acceptance**i for i in range(rows)) for rows in ROWS]
    return max((tokens * seconds[0] / took, rows - 1) for tokens, took, rows in zip(right, seconds, ROWS, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.9, 0.7, 0.5])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, ctx_size=4 * CONTEXT, parallel=1, threads=args.threads, repack="off", ubatch_size=CONTEXT,
        batch_size=CONTEXT, pipeline_parallel_size=1,
    )  # fmt: skip
    model = load_model(config, SingleWorld())
    matrices = {name: tensor for name, tensor in model.checkpoint.tensors.items() if len(tensor.shape) > 1}
    numbers = {planned_type(name, tensor, None) for name, tensor in matrices.items()}
    numbers |= {dtypes.BY_NAME[name].number for name in FORMATS}
    clock = time.process_time if args.threads == 1 else time.perf_counter  # others take no CPU seconds
    turns = []
    for _ in range(args.turns):
        spec = measure_machine(this_machine(), [dtypes.BY_NUMBER[number] for number in sorted(numbers)])
        found = measured(model, clock)
        question = Question(model.checkpoint, Cluster(spec, 1, args.threads, 1), CONTEXT, ubatch_size=CONTEXT)
        plan = Predictor(question, Way("tensor"))
        turns.append(([plan.seconds(StepShape((Chunks(1, rows, CONTEXT),), rows)) for rows in ROWS], found))
    model.close()
    sides = [[statistics.median(turn[side][i] for turn in turns) for i in range(len(ROWS))] for side in (0, 1)]
    for name, side in zip(("predicted", "measured"), sides, strict=True):
        print(f"{name}, ms: " + ", ".join(f"{n} rows {1e3 * s:.2f}" for n, s in zip(ROWS, side, strict=True)))
    for part in args.acceptance:
        (expected, drafted), (real, best) = (gain(side, part) for side in sides)
        print(
            f"{part:.0%} right: gain predicted {expected:.2f} ({drafted} drafted), measured {real:.2f} ({best}); "
            f"{100 * (expected / real - 1):+.0f} %"
        )


if __name__ == "__main__":
    main()
