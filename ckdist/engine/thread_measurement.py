"""Measures the first layer of a model with all threads and with fewer, and sets the threads of decode.

More threads read no faster once memory is the limit, and each barrier takes longer. A step has the same bits on any
number of the rank's threads, so only speed matters.
"""

import functools
import math
import time
from collections.abc import Callable

from ckdist.engine.loaded_model import Model
from ckdist.engine.prefill_measurement import prompt
from ckdist.engine.start_measurement import kept_or_measured
from ckdist.layouts.prefill_choice import Measured, compare
from ckdist.program.executable import DECODE, Executable
from ckdist.program.step_batch import Batch

SECONDS = 0.25  # limit of a measurement
STEPS = 4  # of one duration


def choose_threads(threads: int, model: Model, key: object, remeasure: bool) -> str:
    """Sets the executable's `single_threads`; returns the choice in a few words.

    A collective call.

    Args:
        threads: Number of threads of rank 0, which sends it with each step.
        key, remeasure: As for `kept_or_measured`.
    """
    executable = model.executable
    rows, kept = kept_or_measured("threads", model, key, remeasure, lambda: measure(executable))
    faster = [(count, ratio) for count, ratio, is_faster in rows if is_faster]
    before = "measured before" if kept else "measured"
    if not faster:
        executable.single_threads = threads
        return f"decode: {threads} threads ({before}: {rows[0][0]} are not faster)"
    count, gain = faster[-1][0], math.prod(ratio for _, ratio in faster)
    executable.single_threads = count
    return f"decode: {count} of {threads} threads ({before}: {100 * (1 - gain):.0f} % faster)"


def measure(executable: Executable, clock: Callable[[], float] = time.monotonic) -> list[Measured]:
    """For 3/4 and 1/2 of the threads: their number, seconds / seconds with the number before, whether it is faster.

    Stops at the first number that is not faster.
    """
    batch, rows, end = prompt(executable, 1), [], clock() + SECONDS
    most = executable.threads
    seconds_of = functools.partial(step_seconds, executable, batch)
    seconds_of(most)  # packs the layer, and touches pages and caches
    best = most
    for fewer in dict.fromkeys([most * 3 // 4, most // 2]):
        rows.append((fewer, *compare(seconds_of, (end - clock()) / 2, clock, (best, fewer))))
        if not rows[-1][2]:
            break
        best = fewer
    return rows


def step_seconds(executable: Executable, batch: Batch, threads: int) -> float:
    """Seconds of the first layer, STEPS times."""
    executable.single_threads = threads
    executable.stats(reset=True)
    for _ in range(STEPS):
        executable.run_layer(batch, DECODE)
    return executable.stats().total
