"""Seconds of whole steps of a loaded model by group: products, products of heads, experts, attention, and the rest.

They come from the trace events of the model's threads. This module fits nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from ckdist import native
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.engine.start_up import Model
from ckdist.planning.cost import GROUP_OF, OTHERS
from ckdist.planning.step_shape import StepShape
from ckdist.topology import this_machine

LANE_EVENTS = 1 << 15
EVENT = native.dtype("ckdist_trace_event")
STEPS = 6  # decoded tokens per measurement
WARM = 1  # decoded tokens before a measurement, which fill the caches
READERS = 4  # most CPUs per last-level cache that read other bytes

Groups = dict[str, float]  # seconds by group, and "total" of the whole step


class OtherBytes:
    """Memory that is read to evict earlier data from the caches, by some CPUs of each last-level cache.

    Args:
        most: Bytes to allocate.
    """

    def __init__(self, most: int) -> None:
        by_cache: dict[int, list[int]] = {}
        machine = this_machine()
        for cpu in machine.binding.cpus:
            by_cache.setdefault(machine.by_number[cpu].l3, []).append(cpu)
        self._cpus = [cpu for cpus in by_cache.values() for cpu in islice(cpus, READERS)]
        self._each = np.ones((len(self._cpus), most // 8 // len(self._cpus)), np.int64)  # (readers, numbers)
        self._pool = ThreadPoolExecutor(len(self._cpus))

    def read(self, count: int) -> None:
        """Reads `count` of the bytes."""
        numbers = count // 8 // len(self._cpus)
        if numbers:
            list(self._pool.map(self._read, range(len(self._cpus)), [numbers] * len(self._cpus)))

    def _read(self, reader: int, numbers: int) -> None:
        os.sched_setaffinity(0, {self._cpus[reader]})  # of this thread only
        self._each[reader, :numbers].sum()

    def close(self) -> None:
        """Ends the reading threads."""
        self._pool.shutdown()


class TracedSteps:
    """Measures rank 0's steps of a model.

    Args:
        others: Bytes to read before every decoded token.
    """

    def __init__(self, model: Model, others: OtherBytes | None = None) -> None:
        self._others = others
        self._trace = native.new(native.lib.ckdist_trace_new, LANE_EVENTS)
        self._executable, self._room = model.executable, np.empty(LANE_EVENTS, EVENT)
        self._groups = [
            [GROUP_OF.get(label.split()[0], OTHERS) for label, _ in labels] for labels in model.executable.labels
        ]
        model.executable.trace(self._trace)

    def measured(self, cases: Sequence[tuple[StepShape, int]], turns: int) -> list[list[Groups]]:
        """Measures steps of some shapes.

        Args:
            cases: (shape, other bytes to read before every decoded token). A shape is a prompt, or one token of each
                sequence.
            turns: Measurements of each case. The cases alternate, after a warm-up turn.

        Returns:
            The turns of each case.
        """
        works = [self._work(shape, others) for shape, others in cases]
        rounds = [[self._timed(*work) for work in works] for _ in range(turns + 1)][1:]
        return [list(of_case) for of_case in zip(*rounds, strict=True)]

    def _work(self, shape: StepShape, others: int) -> tuple[Callable[[int], object], int, int]:
        """Returns (function that runs n steps, steps to measure, warm-up steps before them)."""
        chunk = shape.chunks[0]
        if chunk.tokens > 1:
            return self._prompt(chunk.tokens), 1, 0
        return self._decode(chunk.count, chunk.context, others), STEPS, WARM

    def _prompt(self, tokens: int) -> Callable[[int], object]:
        """Each step has a prompt of its own."""
        ids = np.arange(tokens, dtype=np.int32)
        return lambda steps: [SingleSequence(self._executable).feed(ids, outputs="last") for _ in range(steps)]

    def _decode(self, count: int, context: int, others: int) -> Callable[[int], object]:
        """Steps of distinct tokens. The contents of the key-value cache do not matter."""
        sequences = LockstepSequences(self._executable, count)
        ids = np.arange(STEPS * count, dtype=np.int32).reshape(STEPS, count)

        def read_others() -> None:
            """Evicts earlier data before a step."""
            if self._others is not None:
                self._others.read(others)

        def work(steps: int) -> None:
            """Runs steps whose context is `context` in their middle."""
            sequences.length = context - steps // 2
            for step in range(steps):
                read_others()
                for _logits in sequences.run(ids[step : step + 1]):
                    pass

        return work

    def _timed(self, work: Callable[[int], object], steps: int, before: int) -> Groups:
        """Seconds per step by group, after warm-up steps."""
        work(before)
        begin = time.monotonic_ns()
        work(steps)
        found = {"total": (time.monotonic_ns() - begin) * 1e-9 / steps}
        lanes = [events for events in self._lanes() if (events["begin"] >= begin).any()]
        for events in lanes:
            new = events[(events["begin"] >= begin) & (events["kind"] == native.lib.ckdist_trace_step)]
            for at, end, (step, plan, _) in zip(new["begin"], new["end"], new["args"], strict=True):
                group = self._groups[plan][step]
                found[group] = found.get(group, 0.0) + float(end - at) * 1e-9 / steps / len(lanes)
        return found

    def _lanes(self) -> list[Any]:
        """The newest events of each thread, of type EVENT."""
        lib, found = native.lib, []
        for lane in range(lib.ckdist_trace_lanes(self._trace)):
            count = native.call(lib.ckdist_trace_read, self._trace, lane, self._room, [0])
            found.append(self._room[:count].copy())
        return found


__all__ = ["Groups", "OtherBytes", "TracedSteps"]
