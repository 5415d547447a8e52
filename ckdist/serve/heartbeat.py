"""Signs of life of the HTTP process on a pipe to rank 0, written by its event loop: one that is stuck sends none."""

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.5
LOADING_BEAT_SECONDS = 0.05  # until it answers requests: a start waits for that
LOADING, ANSWERING = b".", b"+"  # what a sign of life says
START_SECONDS = 60.0  # until the first one: Python's imports take long on a busy machine
STUCK_SECONDS = 10.0  # without one, then the process is taken for stuck


class Heartbeat:
    """The HTTP process's end."""

    def __init__(self, descriptor: int, answers: Callable[[], bool]):
        """`descriptor`: the pipe's writing end; -1: nobody listens. `answers`: are requests answered?"""
        self.descriptor, self.answers = descriptor, answers
        if descriptor >= 0:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)  # or a child's copy would keep the pipe open

    async def run(self) -> None:
        """A sign of life every BEAT_SECONDS, and LOADING_BEAT_SECONDS before the first answer. Ends when cancelled."""
        pause = LOADING_BEAT_SECONDS
        while self.descriptor >= 0:
            if answers := self.answers():
                pause = BEAT_SECONDS
            with contextlib.suppress(OSError):  # rank 0 does not read, or is gone: the watch over it is elsewhere
                os.write(self.descriptor, ANSWERING if answers else LOADING)
            await asyncio.sleep(pause)


class FailureDetector:
    """Rank 0's end of the pipe `descriptor`, which it closes. `answering` is set once requests are answered."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.answering = threading.Event()
        self.deadline = time.monotonic() + START_SECONDS
        self._looked = time.monotonic()
        self._poll = select.poll()  # whatever the descriptor's number
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Waits for a sign of life, at most `seconds`. True when the process has ended or is stuck."""
        ready = self._poll.poll(1000 * seconds)
        now = time.monotonic()
        if ready:
            signs = os.read(self.descriptor, 4096)
            if not signs:
                return True
            if ANSWERING in signs:
                self.answering.set()
            self.deadline = now + STUCK_SECONDS
        elif now - self._looked > seconds + 2:
            self.deadline = max(self.deadline, now + STUCK_SECONDS)  # this process itself did not run
        self._looked = now
        return now > self.deadline

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self.descriptor)
