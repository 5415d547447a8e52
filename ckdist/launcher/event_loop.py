"""A single-threaded event loop over descriptors and signals."""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping

LONGEST_TURN = 1.0  # seconds between two checks of conditions that have no event


class EventLoop:
    """`turn` waits once. `signals` is a context manager: within it, signals are handled between two events."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Calls `call` when `fd` is ready for `events` (selectors.EVENT_READ, EVENT_WRITE), until `forget`."""
        self._selector.register(fd, events, call)

    def forget(self, fd: int) -> None:
        """Stops watching `fd`."""
        self._selector.unregister(fd)

    def turn(self, deadline: float) -> bool:
        """Waits for events and handles them, until `deadline` (time.monotonic) and at most LONGEST_TURN.

        Returns:
            False if the deadline has passed.
        """
        left = deadline - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(left, LONGEST_TURN))):
            if key.fd in self._selector.get_map():  # an earlier call of this turn may have forgotten it
                key.data()
        return left > 0

    @contextlib.contextmanager
    def signals(self, handlers: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
        """Calls `handlers` for signals that arrive within the block, never in the middle of other work."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = {number: signal.signal(number, lambda *_: None) for number in handlers}
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def handle() -> None:
            """Handles every signal that has arrived, once per arrival."""
            with contextlib.suppress(BlockingIOError):
                for number in os.read(reading, 4096):
                    if number in handlers:
                        handlers[number](number)

        self.watch(reading, selectors.EVENT_READ, handle)
        try:
            yield
        finally:
            self.forget(reading)
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reading)
            os.close(writing)

    def close(self) -> None:
        """Closes the selector."""
        self._selector.close()
