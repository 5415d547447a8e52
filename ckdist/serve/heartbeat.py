"""Signs of life of the HTTP process on a pipe to rank 0, written by its event loop: one that is stuck sends none."""

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.5
LOADING, LOADED = b".", b"+"  # what a sign of life says of the tokenizer
START_SECONDS = 60.0  # until the first one: Python's imports take long on a busy machine
STUCK_SECONDS = 10.0  # without one, then the process is taken for stuck


class Heartbeat:
    """The HTTP process's end."""

    def __init__(self, descriptor: int, loaded: Callable[[], bool]):
        """`descriptor`: the pipe's writing end; -1: nobody listens. `loaded`: is the tokenizer there?"""
        self.descriptor, self.loaded = descriptor, loaded
        if descriptor >= 0:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)  # or a child's copy would keep the pipe open

    async def run(self) -> None:
        """A sign of life every BEAT_SECONDS, until it is cancelled."""
        while self.descriptor >= 0:
            with contextlib.suppress(OSError):  # rank 0 does not read, or is gone: the watch over it is elsewhere
                os.write(self.descriptor, LOADED if self.loaded() else LOADING)
            await asyncio.sleep(BEAT_SECONDS)


class FailureDetector:
    """Rank 0's end of the pipe `descriptor`, which it closes. `loaded` is set once the process has its tokenizer."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.loaded = threading.Event()
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
            if LOADED in signs:
                self.loaded.set()
            self.deadline = now + STUCK_SECONDS
        elif now - self._looked > seconds + 2:
            self.deadline = max(self.deadline, now + STUCK_SECONDS)  # this process itself did not run
        self._looked = now
        return now > self.deadline

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self.descriptor)
