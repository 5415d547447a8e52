"""Starts the ranks of a host. A process that has imported the modules of a rank forks them, if it can.

It runs the command of the ranks, which stops after its imports (`ckdist/cli/warm_ranks.py`). So a forked rank has the
arguments, flags and modules of a new process. Ranks become children of this process.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckdist.comm.bootstrap.launched_world import describe
from ckdist.comm.bootstrap.launchers import RANK_VARIABLES
from ckdist.errors import CommError
from ckdist.launcher.children import Child, Children
from ckdist.launcher.job import FULL_RANKS_VARIABLE, Job
from ckdist.python_words import module_words

WARM_VARIABLE = "CKDIST_WARM"  # names the socket of the process, by descriptor and inode
ROOM = 4096  # bytes for the variables of a rank, so that /proc/PID/environ shows them
MAX_DESCRIPTORS, MAX_MESSAGE = 240, 1 << 16  # of a request; the kernel's limit is 253 descriptors, with 4 of ours
IMPORT_SECONDS, FORK_SECONDS = 30.0, 10.0
GO = b"g"  # to a rank, when its process id has arrived


@dataclass(frozen=True)
class RankStart:
    """Arguments of `Children.start` for a rank."""

    environment: Mapping[str, str]
    streams: Sequence[int | None]
    descriptors: Sequence[int]
    own_group: bool

    @property
    def common(self) -> dict[str, str]:
        """The variables that modules may read while they are imported. They are the same for all ranks and runs."""
        return {name: value for name, value in self.environment.items() if not _of_rank(name)}

    @functools.cached_property
    def message(self) -> bytes:
        """The request to the process that forks."""
        own = {name: value for name, value in self.environment.items() if _of_rank(name)}
        parts = {"environment": own, "descriptors": list(self.descriptors), "own_group": self.own_group}
        return json.dumps(parts).encode()

    @property
    def is_sent_whole(self) -> bool:
        """False if the rank has too many connections for a request, as rank 0 of a host with 240 ranks."""
        return len(self.descriptors) <= MAX_DESCRIPTORS and len(self.message) <= MAX_MESSAGE


def _of_rank(name: str) -> bool:
    return name in RANK_VARIABLES or name == FULL_RANKS_VARIABLE or name.startswith("CKDIST_ENGINE_")


def can_fork(command: Sequence[str]) -> bool:
    """Returns True if the command is `ckdist` of this Python, and no other program starts it."""
    main = module_words("ckdist.cli.main")
    if list(command[: len(main)]) == main:
        return True
    with contextlib.suppress(OSError), pathlib.Path(sys.executable).with_name("ckdist").open("rb") as script:
        return command[0] == "ckdist" and script.readline().strip() == f"#!{sys.executable}".encode()
    return False


def _build(environment: Mapping[str, str]) -> list[tuple[int, int]]:
    """Identifies the installed files: after an update, a process has the code of the old ones."""
    package = pathlib.Path(__file__).parents[1]
    files = package / "__init__.py", pathlib.Path(environment.get("CKDIST_LIBRARY") or package / "native/libckdist.so")
    return [(found.st_ino, found.st_mtime_ns) for found in (file.stat() for file in files if file.exists())]


class RankForker:
    """Has the process that forks. Starts it when it is first needed, and again if it has ended."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._made_for: tuple[object, ...] = ()
        self._refuses = False  # it did not answer once

    def start(
        self, children: Children, job: Job, ended: Callable[[Child], object], start: RankStart, *, forks: bool
    ) -> Child:
        """Starts a rank. Raises OSError if its command cannot be started.

        Args:
            ended: Called when the rank has ended.
            forks: Whether other ranks are started like this one, now or later.
        """
        if forks and not self._refuses and start.is_sent_whole and can_fork(job.command):
            try:
                return self._fork(self._warm(children, job, start), children, ended, start)
            except CommError:
                self._refuses = True
                self.close()
        return children.start(
            job.command,
            ended,
            environment=start.environment,
            folder=job.folder,
            streams=start.streams,
            descriptors=start.descriptors,
            own_group=start.own_group,
        )

    def close(self) -> None:
        """Ends the process. Its ranks go on."""
        if self._socket is not None and self._child is not None:
            self._socket.close()
            self._child.signal(signal.SIGKILL)
        self._child = self._socket = None

    def _warm(self, children: Children, job: Job, start: RankStart) -> socket.socket:
        """Returns the connection to a process that has the words and variables of this rank."""
        made_for = (job.command, job.folder, job.captured, start.common, _build(start.common))
        runs = self._child is not None and self._child.code is None
        if self._socket is not None and runs and self._made_for == made_for:
            return self._socket
        self.close()
        self._made_for = made_for
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = subprocess.DEVNULL if job.captured else None
        with other:
            self._child = children.start(
                job.command,
                lambda _: None,
                environment=start.common | {WARM_VARIABLE: describe({0: other.fileno()}) + " " * ROOM},
                folder=job.folder,
                streams=(subprocess.DEVNULL, output, output),
                descriptors=[other.fileno()],
                own_group=job.captured,  # else it must be in the session of rank 0
            )
        _number_from(self._socket, IMPORT_SECONDS)
        return self._socket

    @staticmethod
    def _fork(warm: socket.socket, children: Children, ended: Callable[[Child], object], start: RankStart) -> Child:
        ours, theirs = socket.socketpair()
        with ours, theirs, pathlib.Path(os.devnull).open("r+b", buffering=0) as null:
            numbers = (null.fileno() if s == subprocess.DEVNULL else s for s in start.streams)
            streams = [number if s is None else s for number, s in enumerate(numbers)]
            with contextlib.suppress(OSError):
                socket.send_fds(warm, [start.message], [theirs.fileno(), *streams, *start.descriptors])
            theirs.close()
            child = children.adopt(_number_from(ours, FORK_SECONDS), ended, start.own_group)
            ours.send(GO)
        return child


def _number_from(connection: socket.socket, seconds: float) -> int:
    """Returns the number that arrives. Raises CommError if there is none."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError):
        if (data := connection.recv(32)).isdigit():
            return int(data)
    raise CommError("the process that forks ranks does not answer")
