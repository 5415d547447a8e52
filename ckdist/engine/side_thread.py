"""A thread for short pieces of native work next to the engine's own. It is abandoned if a piece does not end."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger(__name__)

Piece = Callable[[], Any]
LOOK_SECONDS = 0.02  # between checks of a long piece
STALL = 20  # a piece that waits, for example for a lock, may take this many times as long as one that computes


class SideThread:
    """Runs lists of pieces in order while the caller does other work.

    Native code cannot be ended from outside. So a thread whose piece takes more than `seconds` of CPU time is
    abandoned, and a new thread replaces it. `left_behind` is called before that, so that later pieces do not wait for
    the same lock.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._start()

    def begin(self, pieces: Sequence[Piece]) -> "Batch":
        """Starts `pieces`. Earlier batches finish first."""
        batch = Batch(pieces)
        self._batches.put(batch)
        return batch

    def finish(self, batch: "Batch", left_behind: Callable[[int], None]) -> None:
        """Waits for `batch`. Raises the error of a piece.

        Args:
            left_behind: Called with the index of each piece whose thread is abandoned.
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
            log.error("a piece of work in thread %s took more than %g s and is abandoned", self._name, self._seconds)
            batch.abandoned = True
            left_behind(stuck)
            self._end()
            self._start()
            batch = Batch(batch.pieces, stuck + 1)
            self._batches.put(batch)

    def _start(self) -> None:
        """Starts a thread with its own queue. It inherits the CPUs that the caller may use now."""
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._batches,), name=self._name, daemon=True)
        thread.start()
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._end = weakref.finalize(self, self._batches.put, None)

    def _is_stuck(self, batch: "Batch") -> bool:
        """True if the current piece has taken too long."""
        began = batch.began
        if began is None:
            return False
        computed, waited = time.clock_gettime(self._clock) - began[0], time.monotonic() - began[1]
        return computed > self._seconds or waited > STALL * self._seconds


class Batch:
    """Pieces of work.

    Attributes:
        done: Number of leading pieces that are done, or were done before.
        began: CPU time of the thread, and the clock, at the start of the next piece. None: not started.
        ended: Gets None, or the error of a piece.
        abandoned: Another thread has taken over the rest.
    """

    def __init__(self, pieces: Sequence[Piece], done: int = 0) -> None:
        self.pieces, self.done = pieces, done
        self.began: tuple[float, float] | None = None
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.abandoned = False

    def run(self) -> None:
        """Runs the pieces in order, until another thread has taken them over."""
        for piece in self.pieces[self.done :]:
            self.began = time.thread_time(), time.monotonic()
            piece()
            if self.abandoned:
                return
            self.done += 1


def _work(batches: "queue.SimpleQueue[Batch | None]") -> None:
    """The loop of the thread. None ends it."""
    while (batch := batches.get()) is not None:
        try:
            batch.run()
        except BaseException as error:
            batch.ended.put(error)
        else:
            batch.ended.put(None)
