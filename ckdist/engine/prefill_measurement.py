"""Measures the first layer of a model in both forms of prefill, and sets the form."""

import functools
import os
import time
from collections.abc import Callable

import numpy as np

from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.loaded_model import Model
from ckdist.engine.start_measurement import kept_or_measured
from ckdist.layouts.prefill_choice import Measured, PrefillChoice, choose, compare
from ckdist.program.executable import DECODE, PREFILL, Executable
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots

LEAST_TOKENS = 8  # smallest measured step
SECONDS = 4.0  # limit of a measurement; the largest size gets half of it, the next one half of the rest


def choose_prefill(
    config: EngineConfig, model: Model, key: Callable[[], object], remeasure: bool, unmeasured: str
) -> PrefillChoice:
    """Sets the `prefill_from` of an executable with two layouts. A collective call, while the cache is empty.

    Args:
        key: Collects the key of `kept_or_measured`. A collective call.
        remeasure: As for `kept_or_measured`.
        unmeasured: The reason to measure nothing, such as threads that share cores, or "".
    """
    executable = model.executable
    if config.prefill == "token":
        executable.prefill_from = 0
        return PrefillChoice(0, "token-parallel, as --prefill says")
    if unmeasured and not remeasure:
        return PrefillChoice(reason=f"tensor-parallel ({unmeasured})")
    again = AGAIN in os.environ  # requests wait, and both forms give the same bits
    measured = lambda: [] if again else measure(executable)
    rows, kept = kept_or_measured("prefill", model, key(), remeasure, measured)
    choice = choose(rows, kept) if rows else PrefillChoice(reason="tensor-parallel (not measured after a restart)")
    executable.prefill_from = choice.from_tokens
    return choice


def measure(executable: Executable, clock: Callable[[], float] = time.monotonic) -> list[Measured]:
    """Rows for `choose`. Rank 0 calls it, while the other ranks are in `work()`.

    Smaller sizes are measured only while token-parallel is faster, so several sizes have no higher chance of error.
    """
    size, rows = min(executable.max_tokens, executable.context_length, executable.num_blocks * BLOCK_TOKENS), []
    end = clock() + SECONDS
    for phase in (DECODE, PREFILL):  # packs the layer, and touches pages and caches
        layer_seconds(executable, prompt(executable, size), phase)
    while size >= LEAST_TOKENS:
        seconds_of = functools.partial(layer_seconds, executable, prompt(executable, size))
        rows.append((size, *compare(seconds_of, (end - clock()) / 2, clock)))
        if not rows[-1][2]:
            break
        size //= 2
    return rows


def prompt(executable: Executable, size: int) -> Batch:
    """A batch with one sequence of `size` tokens, without context and logits."""
    ids = np.arange(size, dtype=np.int32) % executable.vocab_size
    blocks = np.arange(-(-size // BLOCK_TOKENS), dtype=np.int32)
    chunk = np.array([[size, 0, len(blocks)]], np.int32)
    return Batch(ids, chunk, blocks, np.zeros(0, np.int32), own_slots(executable.state_slots, range(1), 0))


def layer_seconds(executable: Executable, batch: Batch, phase: int) -> float:
    """Seconds of the first layer."""
    executable.stats(reset=True)
    executable.run_layer(batch, phase)
    return executable.stats().total
