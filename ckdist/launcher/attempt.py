"""One run of a job: from reaching its hosts to the end of all ranks."""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckdist.errors import ConfigError
from ckdist.launcher.children import NOT_EXECUTABLE, NOT_FOUND, Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.job import Job
from ckdist.launcher.keeper import Keeper
from ckdist.launcher.local_ranks import LocalRanks, StartError
from ckdist.launcher.rank_output import Output
from ckdist.launcher.remote_ranks import RemoteRanks

REACH_SECONDS = 30.0  # limit for every host's agent to answer
SURVIVOR_SECONDS = 2.0  # after a rank has failed, the others may report their errors for this long
HURRY_SECONDS = 5.0  # limit for ranks to end after a second signal
USER_MISTAKE = 2
FINAL_CODES = (USER_MISTAKE, NOT_EXECUTABLE, NOT_FOUND)  # a restart does not help


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int  # exit code of the job
    reason: str = ""  # one line; "" for code 0
    again: bool = False  # a restart may help
    unreached: tuple[str, ...] = ()  # the hosts that could not be reached, if that is the reason
    by_signal: bool = False  # a signal is the reason


class Attempt:
    """Runs a job once.

    Args:
        placed: The ranks of each host.
        agents: The command that starts the agent on each host; None for this host.
        stop_seconds: Limit for ranks to end after a signal.
        keeper: Holds the weights of this host's ranks between runs.
        resting: Hosts whose agents wait for a further run. Takes and leaves them here.
    """

    def __init__(
        self,
        loop: EventLoop,
        children: Children,
        job: Job,
        placed: Mapping[str, range],
        agents: Mapping[str, Sequence[str] | None],
        output: Output,
        stop_seconds: float,
        keeper: Keeper | None,
        resting: dict[str, RemoteRanks],
    ) -> None:
        self._keeper, self._resting = keeper, resting
        self._loop, self._children, self._job, self._output = loop, children, job, output
        self._placed = {host: ranks for host, ranks in placed.items() if ranks}
        self._agents, self._stop_seconds = agents, stop_seconds
        self._hosts: dict[str, LocalRanks | RemoteRanks] = {}
        self._failed: list[tuple[int, int]] = []  # (rank, exit code) in the order of failure
        self._trouble: Outcome | None = None  # the first failure of a host
        self._kill_at = math.inf
        self._stops = 0
        self._killed = False

    def run(self) -> Outcome:
        """Starts the ranks and waits until they end. Afterwards no process of the job is left."""
        try:
            if self._reach():
                self._start()
                while not self._done and time.monotonic() < self._kill_at:
                    self._loop.turn(self._kill_at)
                    self._children.hurry()
            return self._outcome()
        finally:
            self._killed = True
            for host in self._hosts.values():
                host.kill()
            for name, host in self._hosts.items():
                if isinstance(host, RemoteRanks) and self._job.keeps and host.rest():
                    self._resting[name] = host
                else:
                    host.close()

    def stop(self, number: int) -> None:
        """Forwards a signal that ends the ranks. They have `stop_seconds`, and less after a second signal."""
        self._stops += 1
        self._kill_within((self._stop_seconds, HURRY_SECONDS, 0.0)[min(self._stops, 3) - 1])
        self.signal(number)

    def signal(self, number: int) -> None:
        """Forwards a signal to all ranks."""
        for host in self._hosts.values():
            host.signal(number)

    # Events of the hosts

    def line(self, _: str, rank: int, stream: int, text: bytes) -> None:
        """Prints a line of a rank."""
        self._output.line(rank, stream, text)

    def said(self, host: str, text: bytes) -> None:
        """Prints a line of the program that reaches a host, such as ssh."""
        self._output.line(host, 2, text)

    def carry(self, source: str, peer: int, data: bytes) -> None:
        """Forwards bytes of the connection between rank 0 and rank `peer`, which came from the host `source`."""
        first = next(iter(self._placed))
        target = first if source != first else next(host for host, ranks in self._placed.items() if peer in ranks)
        self._hosts[target].send(peer, data)

    def counted(self, host: str, nodes: int) -> None:
        """Does nothing: the ranks of a run are already placed."""

    def ended(self, _: str, rank: int, code: int) -> None:
        """Records the end of a rank."""
        if code and not self._killed:
            self._failed.append((rank, code))
            if not self._stops:
                self._kill_within(0.0 if code == USER_MISTAKE else SURVIVOR_SECONDS)

    def lost(self, host: str, reason: str, code: int, reached: bool) -> None:
        """Records that a host cannot be reached, is lost, or refuses the job."""
        if self._trouble is None and not self._killed:
            unreached = () if reached else (host,)
            self._trouble = Outcome(code, reason, code not in FINAL_CODES and not self._stops, unreached)
        self._kill_within(0.0)

    # The attempt's own steps

    @property
    def _done(self) -> bool:
        return all(host.done for host in self._hosts.values())

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _reach(self) -> bool:
        """Starts the agents. Returns whether all hosts are reached."""
        for name in self._placed:
            words = self._agents[name]
            if words is None:
                self._hosts[name] = LocalRanks(self._loop, self._children, self, name, self._keeper)
                continue
            resting = self._resting.pop(name, None)
            if resting is not None and resting.resume(self):
                self._hosts[name] = resting
                continue
            try:
                self._hosts[name] = RemoteRanks(self._loop, self._children, self, name, words)
            except ConfigError as error:
                self.lost(name, str(error), USER_MISTAKE, reached=True)
                return False
        deadline = time.monotonic() + REACH_SECONDS
        while not all(host.ready for host in self._hosts.values()):
            if self._trouble is not None or self._stops:
                return False
            if not self._loop.turn(deadline):
                silent = next(name for name, host in self._hosts.items() if not host.ready)
                self.lost(silent, f"host {silent} has not answered within {REACH_SECONDS:g} s", 1, reached=False)
        return self._trouble is None

    def _start(self) -> None:
        for name, ranks in self._placed.items():
            try:
                self._hosts[name].start(self._job, ranks)
            except StartError as error:
                self.lost(name, str(error), error.code, reached=True)
                return

    def _outcome(self) -> Outcome:
        """Combines the ends of ranks and hosts."""
        if self._failed and not (self._trouble and self._trouble.code in FINAL_CODES):
            # A rank that was ended by a signal is the cause, although other ends may have been noticed first. A code
            # above 128 means a signal too, as in a shell.
            rank, code = min(self._failed, key=lambda failure: (failure[1] > 0, failure[1] <= 128))
            again = code not in FINAL_CODES and not self._stops
            if code > 0:
                return Outcome(code, f"{self._name(rank)} ended with code {code}", again)
            reason = f"{self._name(rank)} was ended by signal {-code} ({signal_name(-code)})"
            return Outcome(128 - code, reason, again, by_signal=True)
        if self._trouble is not None:
            return self._trouble
        if not self._done:
            return Outcome(128 + signal.SIGKILL, "ranks did not end in time after the signal, and were killed")
        return Outcome(0)

    def _name(self, rank: int) -> str:
        host = next(name for name, ranks in self._placed.items() if rank in ranks)
        return f"rank {rank} of {self._job.size}" + (f" on {host}" if len(self._placed) > 1 else "")


def signal_name(number: int) -> str:
    """Returns the name of a signal: SIGKILL for 9."""
    return signal.Signals(number).name if number in signal.valid_signals() else str(number)
