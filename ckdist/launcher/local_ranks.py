"""The ranks of one host: starts them, reads their output, and keeps one end of each connection to another host.

Rank 0 has a connection to every other rank. Two ranks of this host inherit both ends of a socket pair. For a connection
to another host, a rank inherits one end; bytes that arrive at the other end are forwarded (`Events.carry`).
"""

import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ckdist.errors import ConfigError
from ckdist.launcher.channel import Channel
from ckdist.launcher.children import NOT_EXECUTABLE, NOT_FOUND, POLL_SECONDS, Child, Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.job import Job
from ckdist.launcher.keeper import Keeper
from ckdist.launcher.rank_forker import RankForker, RankStart

LONGEST_LINE = 1 << 16
KILL_SECONDS = 10.0  # limit for the kernel to end a killed rank
OUTPUT_SECONDS = 2.0  # limit for reading the last output of ranks that have ended


class Events(Protocol):
    """Events of a host's ranks, for the supervisor. The first argument is the host's name."""

    def line(self, host: str, rank: int, stream: int, text: bytes, /) -> None:
        """A rank has written a line to standard output (1) or standard error (2)."""
        ...

    def carry(self, host: str, peer: int, data: bytes, /) -> None:
        """Bytes for the other end of the connection between rank 0 and rank `peer`; b"": it has ended."""
        ...

    def ended(self, host: str, rank: int, code: int, /) -> None:
        """A rank has ended; `code` is negative if a signal ended it."""
        ...


class StartError(ConfigError):
    """A command cannot be started. `code` is the exit code that a shell would return."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Lines:
    """Splits the output of a rank into lines. A very long line is split; the last one may lack a line end."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take, self._rest = take, b""

    def add(self, data: bytes) -> None:
        """Adds output; b"" marks its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        if self._rest and (not data or len(self._rest) > LONGEST_LINE):
            self._take(self._rest)
            self._rest = b""


class LocalRanks:
    """Some ranks of a job, as processes of this host."""

    ready = True  # this host needs no agent

    def __init__(
        self, loop: EventLoop, children: Children, events: Events, host: str, keeper: Keeper | None = None
    ) -> None:
        self._loop, self._children, self._events, self._host, self._keeper = loop, children, events, host, keeper
        self._forker = keeper.forker if keeper else RankForker()
        self._ranks: dict[int, Child] = {}
        self._links: dict[int, Channel] = {}
        self._outputs: list[Channel] = []

    @property
    def done(self) -> bool:
        """True if no rank runs."""
        return all(child.code is not None for child in self._ranks.values())

    def start(self, job: Job, ranks: range) -> None:
        """Starts these ranks. Raises StartError if the command cannot be started; some ranks may then run."""
        if not os.path.isdir(job.folder):  # noqa: PTH112, the folder is a text
            raise StartError(f"{socket.gethostname()} has no folder {job.folder}: start where all hosts have it", 2)
        ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in ranks}  # rank -> peer -> socket
        for other in range(1, job.size):
            pair = socket.socketpair()
            for own, peer, end in ((0, other, pair[0]), (other, 0, pair[1])):
                if own in ends:
                    ends[own][peer] = end
                elif peer in ends:
                    self._links[other] = self._link(other, end)
                else:
                    end.close()
        try:
            for rank in ranks:
                self._start_rank(job, rank, ranks, {peer: end.fileno() for peer, end in ends[rank].items()})
        finally:
            for end in (end for pairs in ends.values() for end in pairs.values()):
                end.close()
            if self._keeper is None:
                self._forker.close()

    def send(self, peer: int, data: bytes) -> None:
        """Passes on bytes from the other end of a connection to another host; b"": it has ended."""
        link = self._links.get(peer)
        if link is None:
            return
        if data:
            link.send(data)
        else:
            link.end()

    def signal(self, number: int) -> None:
        """Sends a signal to every rank."""
        for child in self._ranks.values():
            child.signal(number)

    def kill(self) -> None:
        """Kills every rank."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills the remaining processes, orphans included, and reads the last of the output."""
        self.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while not self.done and self._loop.turn(min(deadline, time.monotonic() + POLL_SECONDS)):
            self._children.hurry()
        self._children.end_orphans(self._loop)
        deadline = time.monotonic() + OUTPUT_SECONDS
        while any(channel.reads for channel in self._outputs) and self._loop.turn(deadline):
            pass
        for channel in (*self._outputs, *self._links.values()):
            channel.close()

    def _link(self, other: int, end: socket.socket) -> Channel:
        """Watches the end of the connection to rank `other` that no rank of this host has."""
        fd = end.detach()
        return Channel(self._loop, fd, os.dup(fd), lambda data: self._events.carry(self._host, other, data))

    def _start_rank(self, job: Job, rank: int, ranks: range, descriptors: dict[int, int]) -> None:
        environment = job.rank_environment(rank, ranks.start, len(ranks), descriptors)
        kept: list[int] = []
        if self._keeper:
            local = [rank - ranks.start]
            kept = self._keeper.descriptors(local)
            environment |= self._keeper.environment(local)
        pipes: list[tuple[int, int]] = [os.pipe(), os.pipe()] if job.captured else []
        terminal = rank == 0 and not (job.captured and os.isatty(0))
        streams = (None if terminal else subprocess.DEVNULL, *(pipes[i][1] if pipes else None for i in range(2)))
        try:
            self._ranks[rank] = self._forker.start(
                self._children,
                job,
                lambda child: self._events.ended(self._host, rank, child.code or 0),
                RankStart(
                    environment,
                    streams,
                    (*descriptors.values(), *kept),
                    own_group=job.captured or rank > 0,  # Ctrl-C reaches rank 0 if it shares the terminal
                ),
                forks=self._keeper is not None or len(ranks) > 1,
            )
        except OSError as error:
            for reading, _ in pipes:
                os.close(reading)
            raise _refused(job.command, error) from None
        finally:
            for _, writing in pipes:
                os.close(writing)
        for stream, (reading, _) in enumerate(pipes, 1):
            lines = Lines(functools.partial(self._events.line, self._host, rank, stream))
            self._outputs.append(Channel(self._loop, reading, None, lines.add))


def _refused(command: Sequence[str], error: OSError) -> StartError:
    if isinstance(error, FileNotFoundError):
        return StartError(
            f"{socket.gethostname()} has no command {command[0]!r}: use its path, or correct PATH", NOT_FOUND
        )
    return StartError(f"{command[0]} cannot be started: {error.strerror}", NOT_EXECUTABLE)


def nodes_here() -> int:
    """Returns the number of NUMA nodes of this host that this process may use."""
    from ckdist.topology import this_machine

    return this_machine().nodes_in_use()
