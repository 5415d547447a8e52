"""A byte channel to another process over descriptors that never block."""

import os
import selectors
from collections.abc import Callable

from ckdist.launcher.event_loop import EventLoop

CHUNK = 1 << 16


class Channel:
    """Reads and writes without blocking. Owns both descriptors.

    Args:
        reader: Descriptor to read, or None.
        writer: Descriptor to write, or None.
        take: Called with the received data, and with b"" at its end.
    """

    def __init__(
        self, loop: EventLoop, reader: int | None, writer: int | None, take: Callable[[bytes], object]
    ) -> None:
        self._loop, self._reader, self._writer, self._take = loop, reader, writer, take
        self._waiting = bytearray()
        self._ending = False
        for fd in (reader, writer):
            if fd is not None:
                os.set_blocking(fd, False)
        if reader is not None:
            loop.watch(reader, selectors.EVENT_READ, self._read)

    @property
    def reads(self) -> bool:
        """True if more data may arrive."""
        return self._reader is not None

    @property
    def writes(self) -> bool:
        """True if data is waiting to be written."""
        return self._writer is not None and bool(self._waiting)

    def send(self, data: bytes) -> None:
        """Writes data now, or as soon as there is room. Drops it if the other end is closed."""
        if self._writer is None or self._ending:
            return
        idle = not self._waiting
        self._waiting += data
        if idle and self._waiting:
            self._write()
            if self.writes:
                self._loop.watch(self._writer, selectors.EVENT_WRITE, self._write_more)

    def end(self) -> None:
        """Closes both directions after the waiting data is written."""
        self._ending = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Closes both directions at once."""
        if self._writer is not None and self._waiting:
            self._loop.forget(self._writer)
        self._waiting.clear()
        self._close_writer()
        self._close_reader()

    def read_all(self) -> None:
        """Reads all data that has arrived."""
        while self._reader is not None and self._read():
            pass

    def _read(self) -> bool:
        """Reads available data. Returns whether there was any."""
        try:
            data = os.read(self._reader, CHUNK) if self._reader is not None else b""
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # the connection was reset
        if not data:
            self._close_reader()
        self._take(data)
        return bool(data)

    def _write(self) -> None:
        assert self._writer is not None
        try:
            del self._waiting[: os.write(self._writer, self._waiting)]
        except BlockingIOError:
            return
        except OSError:  # the other end is closed
            self._waiting.clear()

    def _write_more(self) -> None:
        self._write()
        if not self._waiting and self._writer is not None:
            self._loop.forget(self._writer)
            if self._ending:
                self.close()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._loop.forget(self._reader)
            os.close(self._reader)
            self._reader = None

    def _close_writer(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
