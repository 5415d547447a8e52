"""One thread that waits for descriptors and signals, and calls who asked for them."""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping

LONGEST_TURN = 1.0  # seconds: what changes without an event is looked at that often


class EventLoop:
    """`turn` waits once. `signals`, a `with`, has numbers of signals handled between two events."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Calls when `fd` can be read or written, as selectors.EVENT_READ and EVENT_WRITE say, until `forget`."""
        self._selector.register(fd, events, call)

    def forget(self, fd: int) -> None:
        """Watches `fd` no more."""
        self._selector.unregister(fd)

    def turn(self, deadline: float) -> bool:
        """Waits for events, until `deadline` (time.monotonic) and LONGEST_TURN at most, and handles them. False when
        the deadline has passed.
        """
        left = deadline - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(left, LONGEST_TURN))):
            if key.fd in self._selector.get_map():  # not forgotten by another call of this turn
                key.data()
        return left > 0

    @contextlib.contextmanager
    def signals(self, handlers: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
        """Calls `handlers` of signals that come meanwhile, never in the midst of something else."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = {number: signal.signal(number, lambda *_: None) for number in handlers}
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def handle() -> None:
            """Every signal that has come, once for each time."""
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
        """Lets go of the kernel's table."""
        self._selector.close()
