"""Heartbeats of the HTTP process on a pipe to rank 0. The event loop sends them, so a stuck process sends none."""

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.5
LOADING_BEAT_SECONDS = 0.05  # until it answers requests, since the server's start waits for that
LOADING, ANSWERING = b".", b"+"  # content of a heartbeat
START_SECONDS = 60.0  # limit for the first heartbeat: Python's imports take long on a busy machine
STUCK_SECONDS = 10.0  # after this time without a heartbeat the process counts as stuck


async def send_heartbeats(descriptor: int, answers: Callable[[], bool]) -> None:
    """Sends a heartbeat every BEAT_SECONDS, or every LOADING_BEAT_SECONDS while loading, until it is cancelled.

    Args:
        descriptor: The pipe's writing end; -1: there is no pipe.
        answers: Returns whether requests are answered.
    """
    if descriptor < 0:
        return
    os.set_blocking(descriptor, False)
    os.set_inheritable(descriptor, False)  # or a child's copy would keep the pipe open
    pause = LOADING_BEAT_SECONDS
    while True:
        if is_answering := answers():
            pause = BEAT_SECONDS
        with contextlib.suppress(OSError):  # rank 0 does not read, or is gone; `HttpServer` notices that
            os.write(descriptor, ANSWERING if is_answering else LOADING)
        await asyncio.sleep(pause)


class FailureDetector:
    """Rank 0's end of the pipe. It owns `descriptor`. `answering` is set once requests are answered."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.answering = threading.Event()
        self.deadline = time.monotonic() + START_SECONDS
        self._looked = time.monotonic()
        self._poll = select.poll()  # unlike select(), it takes descriptors of any number
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a heartbeat. Returns True if the process has ended or is stuck."""
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
            self.deadline = max(self.deadline, now + STUCK_SECONDS)  # this process itself was suspended
        self._looked = now
        return now > self.deadline

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self.descriptor)
