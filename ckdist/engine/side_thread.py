"""A thread for short pieces of native work beside the engine's own, left behind when one of them does not end."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

log = logging.getLogger(__name__)

Piece = Callable[[], Any]


class SideThread:
    """Does lists of pieces in order, while the caller does something else.

    Native code cannot be ended from outside. A thread whose piece lasts for more than `seconds` is abandoned, and
    another one takes its place; what it was doing is reported, so that it is not asked for again.
    """

    def __init__(self, name: str, seconds: float) -> None:
        """`name`: of the thread."""
        self._name, self._seconds = name, seconds
        self._executor = ThreadPoolExecutor(1, name)
        self._executor.submit(lambda: None).result()  # it starts here, on the CPUs that its starter may use now

    def begin(self, pieces: Sequence[Piece]) -> "Batch":
        """Starts on `pieces`. What an earlier batch has left comes first."""
        batch = Batch(pieces)
        batch.future = self._executor.submit(batch.run)
        return batch

    def finish(self, batch: "Batch") -> list[int]:
        """Waits for `batch`; the indices of the pieces that were left behind. Raises what a piece has raised."""
        left: list[int] = []
        while True:
            try:
                batch.future.result(self._seconds)
                return left
            except FutureTimeoutError:
                if batch.future.done():
                    raise  # a piece has raised it
            stuck = batch.done
            left.append(stuck)
            log.error(
                "a piece of work in thread %s did not end within %g s and is left behind", self._name, self._seconds
            )
            self._executor.shutdown(wait=False)
            self._executor = ThreadPoolExecutor(1, self._name)
            rest = Batch(batch.pieces, stuck + 1)
            batch.abandoned = True
            rest.future = self._executor.submit(rest.run)
            batch = rest


class Batch:
    """Pieces of work, of which the first `done` are done."""

    future: Future[None]

    def __init__(self, pieces: Sequence[Piece], done: int = 0) -> None:
        """The first `done` of `pieces` are left out."""
        self.pieces, self.done = pieces, done
        self.abandoned = False

    def run(self) -> None:
        """Does the pieces, one after the other, until somebody else has taken them over."""
        for piece in self.pieces[self.done :]:
            piece()
            if self.abandoned:
                return
            self.done += 1
