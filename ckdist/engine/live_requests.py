"""Live requests before batches: batches wait while a live prompt is read, and their steps stay short meanwhile."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from ckdist.engine.sequence import Sequence

LIVE_SECONDS = 60.0  # after the last live request, in which the next one is expected
BATCH_PART = 0.0625  # of the limit of a step, for prompts of batches meanwhile


class LiveRequests:
    """The last time and the present prompts of requests that are in no batch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._seen_at = clock, -math.inf
        self._is_read = False

    def see(self, sequence: Sequence) -> None:
        """Takes note of a new sequence."""
        if not sequence.place.batch:
            self._seen_at = self._clock()

    def first(self, running: Collection[Sequence]) -> Iterator[Sequence]:
        """Yields the sequences of a step: without those of batches while a live prompt is being read."""
        self._is_read = any(not s.place.batch and s.length - s.computed > 1 for s in running)
        return (sequence for sequence in running if not self.holds(sequence))

    def holds(self, sequence: Sequence) -> bool:
        """True if a sequence waits in the step of the last call of `first`."""
        return self._is_read and sequence.place.batch

    def batch_seconds(self, running: Iterable[Sequence], limit: float) -> float:
        """Returns the most seconds of batches' prompts in a step. `limit` is that of all prompts."""
        if any(not s.place.batch for s in running):
            self._seen_at = self._clock()
        return BATCH_PART * limit if self._clock() - self._seen_at < LIVE_SECONDS else math.inf
