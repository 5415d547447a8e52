"""Child processes: none outlives this process, and none stays a zombie."""

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import psutil

from ckdist.ended_threads import end_soon
from ckdist.launcher.event_loop import EventLoop
from ckdist.prctl import adopt_orphans, die_with_parent

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes of a command that cannot be started, as in a shell
POLL_SECONDS = 0.05
LEAVE_SECONDS = 5.0  # limit for processes that ranks left behind to end after SIGTERM, and after SIGKILL


@dataclass
class Child:
    """A process that this process started."""

    pid: int
    leads_group: bool  # signals go to all processes of its group
    ended: Callable[["Child"], object]
    process: "subprocess.Popen[bytes] | None" = None
    code: int | None = None  # as in subprocess; None while it runs

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if self.leads_group else os.kill)(self.pid, number)


class Children:
    """Starts processes and collects their exit codes. Call `reap` at SIGCHLD. A process has one such object."""

    def __init__(self) -> None:
        adopt_orphans()
        self._running: dict[int, Child] = {}

    def start(
        self,
        words: Sequence[str],
        ended: Callable[[Child], object],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        streams: Sequence[int | IO[Any] | None] = (None, None, None),
        descriptors: Sequence[int] = (),
        own_group: bool = True,
        at_our_end: int = signal.SIGKILL,
    ) -> Child:
        """Starts the command `words`.

        Args:
            ended: `reap` calls `ended(child)` when the process has ended.
            streams: Standard input, output and error.
            descriptors: Further descriptors that the process inherits.
            own_group: Start a new session, which a terminal's Ctrl-C does not reach.
            at_our_end: Signal that the process gets when this process ends.

        Raises:
            OSError: The command cannot be started.
        """
        parent = os.getpid()
        process = subprocess.Popen(
            list(words),
            env=environment,
            cwd=folder,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=tuple(descriptors),
            start_new_session=own_group,
            preexec_fn=functools.partial(die_with_parent, parent, at_our_end),  # noqa: PLW1509, there is one thread
        )
        child = self._running[process.pid] = Child(process.pid, own_group, ended, process)
        return child

    def adopt(self, pid: int, ended: Callable[[Child], object], own_group: bool) -> Child:
        """Takes over a child that this process did not start itself. The arguments are those of `start`."""
        child = self._running[pid] = Child(pid, own_group, ended)
        return child

    def reap(self) -> None:
        """Collects every process that has ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._running.pop(pid, None)
            if child is not None:
                child.code = os.waitstatus_to_exitcode(status)
                if child.process is not None:
                    child.process.returncode = child.code
                child.ended(child)

    def hurry(self) -> None:
        """Lets processes that were killed end soon. Call this often."""
        for pid in self._running:
            end_soon(pid)

    def orphans(self) -> list[psutil.Process]:
        """Returns the processes that ended children have left behind, with all their descendants."""
        found: list[psutil.Process] = []
        for process in psutil.Process().children():
            if process.pid not in self._running:
                with contextlib.suppress(psutil.Error):
                    found += [process, *process.children(recursive=True)]
        return found

    def end_orphans(self, loop: EventLoop) -> None:
        """Ends processes that were left behind: SIGTERM, then SIGKILL. Waits until none is left."""
        self.reap()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.orphans():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            deadline = time.monotonic() + LEAVE_SECONDS
            while self.orphans() and time.monotonic() < deadline:
                loop.turn(min(deadline, time.monotonic() + POLL_SECONDS))
                self.reap()
