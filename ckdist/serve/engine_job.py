"""An engine as a child of the HTTP process: one job of ranks, which answers on a socket of its own."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from typing import IO, TYPE_CHECKING

from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.config.given_elsewhere import environment_without
from ckdist.config.serve_config import ServeConfig
from ckdist.ended_threads import end_soon
from ckdist.engine.socket_directory import DIRECTORY, PARENT, PREFIX, TURNS, socket_address
from ckdist.python_words import module_words
from ckdist.serve.error_output import ErrorOutput

if TYPE_CHECKING:
    from ckdist.launcher.keeper import Keeper

LOOK_SECONDS = 0.02
STOP_SECONDS = 10.0  # limit for a job without requests to end


class EngineJob:
    """A running job. The kernel kills it if this process ends. `stop` ends it and removes its folder.

    Args:
        words: Flags of its `ckdist serve`.
        cpus: CPUs of its ranks. Empty: this process's.
        turns: FILE:NUMBER, the job's row in the file of `CoreTurns`. Empty: it takes no turns.
        directory: For its socket. None: one of its own, which `kill` removes.
        output: As `stdout` of `subprocess.Popen`.
        launch: Words of `ckdist launch` before `serve`. Empty: the job is this host's.
        again: Whether the job ran before.
        keeper: Holds the weights of its `ranks` ranks for a later job. None: they end with the job.
    """

    def __init__(
        self,
        words: Sequence[str],
        cpus: Collection[int] = (),
        turns: str = "",
        directory: str | None = None,
        output: int = subprocess.DEVNULL,
        launch: Sequence[str] = (),
        again: bool = False,
        keeper: "Keeper | None" = None,
        ranks: int = 1,
    ) -> None:
        self._own_directory = tempfile.mkdtemp(prefix=PREFIX) if directory is None else None
        directory = directory or self._own_directory or ""
        self.endpoint = socket_address(directory)
        environment = environment_without(ServeConfig) | {DIRECTORY: directory, PARENT: str(os.getpid())}
        if turns:
            environment[TURNS] = turns
        if again:
            environment[AGAIN] = "1"
        if keeper:
            environment |= keeper.environment(range(ranks))
        self._errors = ErrorOutput()
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus or own)  # the job inherits this thread's CPUs
        try:
            self._process = subprocess.Popen(
                module_words("ckdist.cli.child_engine", *launch, "serve", *words),
                stdin=subprocess.PIPE,  # for `answer`
                stdout=output,
                stderr=self._errors.writing,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process, which then drains the job
                env=environment,
                pass_fds=keeper.descriptors(range(ranks)) if keeper else (),
            )
        finally:
            os.sched_setaffinity(0, own)
            self._errors.started()

    @property
    def has_ended(self) -> bool:
        """True if the job has ended."""
        if self._process.poll() is None:
            end_soon(self._process.pid)
            return False
        return True

    @property
    def output(self) -> IO[bytes]:
        """Its standard output, if `output` was a pipe."""
        assert self._process.stdout is not None, "a pipe"
        return self._process.stdout

    def answer(self, restart: bool) -> None:
        """Answers the launcher of its ranks, which have ended: whether they start again."""
        assert self._process.stdin is not None, "a pipe"
        with contextlib.suppress(BrokenPipeError):
            if restart:
                os.write(self._process.stdin.fileno(), b"\n")
            else:
                self._process.stdin.close()

    @property
    def code(self) -> int:
        """The exit code of a job that has ended; negative: the signal that ended it."""
        return self._process.wait()

    def reason(self) -> str:
        """Returns the reason of its end: its last line, or how its process ended."""
        code = self._process.poll() or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        line = self._errors.last_line()
        return line.removeprefix("ckdist: ") if line and code > 0 else how

    async def ended_within(self, seconds: float) -> bool:
        """Waits until the job has ended, at most `seconds`. Returns whether it has."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self.has_ended and loop.time() < end:  # noqa: ASYNC110 - it has a time limit
            await asyncio.sleep(LOOK_SECONDS)
        return self.has_ended

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Drains the job and waits `seconds`. Then kills it."""
        if not self.has_ended:
            self._process.terminate()
            await self.ended_within(seconds)
        await asyncio.to_thread(self.kill)  # the kernel needs seconds to free the memory of a large model

    def kill(self) -> None:
        """Kills the job, waits for it and removes its folder. Its ranks end with its first process."""
        self._process.kill()
        self._process.wait()
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)
