"""A thread for short pieces of native work beside the engine's own, left behind when one of them does not end."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger(__name__)

Piece = Callable[[], Any]
LOOK_SECONDS = 0.02  # between looks at a piece that lasts
STALL = 20  # a piece that waits, for a lock as an example, may take so many times as long as one that computes


class SideThread:
    """Does lists of pieces in order, while the caller does something else.

    Native code cannot be ended from outside. A thread whose piece takes more than `seconds` of CPU time is abandoned,
    and another one takes its place; who waits is told first, so that the rest does not wait for the same.
    """

    def __init__(self, name: str, seconds: float) -> None:
        """`name`: of the thread."""
        self._name, self._seconds = name, seconds
        self._start()

    def begin(self, pieces: Sequence[Piece]) -> "Batch":
        """Starts on `pieces`. What an earlier batch has left comes first."""
        batch = Batch(pieces)
        self._batches.put(batch)
        return batch

    def finish(self, batch: "Batch", left_behind: Callable[[int], None]) -> None:
        """Waits for `batch`; `left_behind` gets the index of each piece that the thread is left behind with. Raises
        what a piece has raised.
        """
        while True:
            try:
                error = batch.ended.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if not self._is_stuck(batch):
                    continue
            else:
                if error is not None:
                    raise error
                return
            stuck = batch.done
            log.error("a piece of work in thread %s took more than %g s and is left behind", self._name, self._seconds)
            batch.abandoned = True
            left_behind(stuck)
            self._end()
            self._start()
            batch = Batch(batch.pieces, stuck + 1)
            self._batches.put(batch)

    def _start(self) -> None:
        """A thread with a queue of its own. It starts here, on the CPUs that its starter may use now."""
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._batches,), name=self._name, daemon=True)
        thread.start()
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._end = weakref.finalize(self, self._batches.put, None)

    def _is_stuck(self, batch: "Batch") -> bool:
        """Whether the piece that the thread is at has taken too long."""
        began = batch.began
        if began is None:
            return False
        computed, waited = time.clock_gettime(self._clock) - began[0], time.monotonic() - began[1]
        return computed > self._seconds or waited > STALL * self._seconds


class Batch:
    """Pieces of work, of which the first `done` are done. `began`: CPU time of the thread, and the clock, when it began
    with the next one; None: not yet. `ended`: gets None, or what a piece has raised.
    """

    def __init__(self, pieces: Sequence[Piece], done: int = 0) -> None:
        """The first `done` of `pieces` are left out."""
        self.pieces, self.done = pieces, done
        self.began: tuple[float, float] | None = None
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.abandoned = False

    def run(self) -> None:
        """Does the pieces, one after the other, until somebody else has taken them over."""
        for piece in self.pieces[self.done :]:
            self.began = time.thread_time(), time.monotonic()
            piece()
            if self.abandoned:
                return
            self.done += 1


def _work(batches: "queue.SimpleQueue[Batch | None]") -> None:
    """The thread, until it finds None."""
    while (batch := batches.get()) is not None:
        try:
            batch.run()
        except BaseException as error:
            batch.ended.put(error)
        else:
            batch.ended.put(None)
