"""One run of a job, from reaching its hosts to the end of all ranks, and how it ended."""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckdist.errors import ConfigError
from ckdist.launcher.children import NOT_EXECUTABLE, NOT_FOUND, Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.job import Job
from ckdist.launcher.local_ranks import LocalRanks, StartError
from ckdist.launcher.output import Output
from ckdist.launcher.remote_ranks import RemoteRanks

REACH_SECONDS = 30.0  # until every host's agent has answered
SURVIVOR_SECONDS = 2.0  # in which the other ranks may say why they end, once one has failed
HURRY_SECONDS = 5.0  # that ranks have after a second signal
USER_MISTAKE = 2
FINAL_CODES = (USER_MISTAKE, NOT_EXECUTABLE, NOT_FOUND)  # starting again does not mend these


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the job's exit `code`, the `reason` in one line ("" for code 0), whether to start it `again` may
    help, and the hosts that were `unreached`, where that was the reason. `by_signal`: a signal was the reason.
    """

    code: int
    reason: str = ""
    again: bool = False
    unreached: tuple[str, ...] = ()
    by_signal: bool = False


class Attempt:
    """`placed`: the ranks of each host; `agents`: the words that start the agent on each, None on this one."""

    def __init__(
        self,
        loop: EventLoop,
        children: Children,
        job: Job,
        placed: Mapping[str, range],
        agents: Mapping[str, Sequence[str] | None],
        output: Output,
        stop_seconds: float,
    ) -> None:
        self._loop, self._children, self._job, self._output = loop, children, job, output
        self._placed = {host: ranks for host, ranks in placed.items() if ranks}
        self._agents, self._stop_seconds = agents, stop_seconds
        self._hosts: dict[str, LocalRanks | RemoteRanks] = {}
        self._failed: list[tuple[int, int]] = []  # ranks and their codes, in the order of their ends
        self._trouble: Outcome | None = None  # with a host
        self._kill_at = math.inf
        self._stops = 0
        self._killed = False

    def run(self) -> Outcome:
        """Starts the ranks and waits for their ends. When it returns nothing of the job is left."""
        try:
            if self._reach():
                self._start()
                while not self._done and time.monotonic() < self._kill_at:
                    self._loop.turn(self._kill_at)
            return self._outcome()
        finally:
            self._killed = True
            for host in self._hosts.values():
                host.kill()
            for host in self._hosts.values():
                host.close()

    def stop(self, number: int) -> None:
        """Passes on a signal that asks the ranks to end; they have `stop_seconds`, and less after a second one."""
        self._stops += 1
        self._kill_within((self._stop_seconds, HURRY_SECONDS, 0.0)[min(self._stops, 3) - 1])
        self.signal(number)

    def signal(self, number: int) -> None:
        """Passes on a signal."""
        for host in self._hosts.values():
            host.signal(number)

    # What hosts tell

    def line(self, rank: int, stream: int, text: bytes) -> None:
        """A rank's line."""
        self._output.line(rank, stream, text)

    def said(self, host: str, text: bytes) -> None:
        """A line of what brings commands to a host."""
        self._output.line(host, 2, text)

    def carry(self, source: str, peer: int, data: bytes) -> None:
        """Bytes of the connection between rank 0 and `peer` have come from the host `source`."""
        first = next(iter(self._placed))
        target = first if source != first else next(host for host, ranks in self._placed.items() if peer in ranks)
        self._hosts[target].send(peer, data)

    def ended(self, rank: int, code: int) -> None:
        """A rank has ended."""
        if code and not self._killed:
            self._failed.append((rank, code))
            if not self._stops:
                self._kill_within(0.0 if code == USER_MISTAKE else SURVIVOR_SECONDS)

    def lost(self, host: str, reason: str, code: int, reached: bool) -> None:
        """A host cannot be reached, or not any more, or refuses."""
        if self._trouble is None and not self._killed:
            unreached = () if reached else (host,)
            self._trouble = Outcome(code, reason, code not in FINAL_CODES and not self._stops, unreached)
        self._kill_within(0.0)

    # Its own steps

    @property
    def _done(self) -> bool:
        return all(host.done for host in self._hosts.values())

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _reach(self) -> bool:
        """Whether all hosts are there."""
        for name in self._placed:
            words, events = self._agents[name], HostEvents(self, name)
            if words is None:
                self._hosts[name] = LocalRanks(self._loop, self._children, events)
                continue
            try:
                self._hosts[name] = RemoteRanks(self._loop, self._children, events, name, words)
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
        """Starts the ranks of every host."""
        for name, ranks in self._placed.items():
            try:
                self._hosts[name].start(self._job, ranks)
            except StartError as error:
                self.lost(name, str(error), error.code, reached=True)
                return

    def _outcome(self) -> Outcome:
        """What the ends of ranks and hosts come to."""
        if self._failed and not (self._trouble and self._trouble.code in FINAL_CODES):
            # a rank that a signal has ended, or that says so by a code above 128 as a shell does, is why others failed,
            # whose ends may have been noticed first
            rank, code = min(self._failed, key=lambda failure: (failure[1] > 0, failure[1] <= 128))
            again = code not in FINAL_CODES and not self._stops
            if code > 0:
                return Outcome(code, f"{self._name(rank)} ended with code {code}", again)
            reason = f"{self._name(rank)} was ended by signal {-code} ({signal_name(-code)})"
            return Outcome(128 - code, reason, again, by_signal=True)
        if self._trouble is not None:
            return self._trouble
        if not self._done:
            return Outcome(128 + signal.SIGKILL, "ranks did not end in time after they were told to, and were killed")
        return Outcome(0)

    def _name(self, rank: int) -> str:
        """A rank as a person knows it."""
        host = next(name for name, ranks in self._placed.items() if rank in ranks)
        return f"rank {rank} of {self._job.size}" + (f" on {host}" if len(self._placed) > 1 else "")


@dataclass(frozen=True)
class HostEvents:
    """What one host tells of its ranks, with its name."""

    attempt: Attempt
    host: str

    def line(self, rank: int, stream: int, text: bytes) -> None:
        """A rank's line."""
        self.attempt.line(rank, stream, text)

    def carry(self, peer: int, data: bytes) -> None:
        """Bytes for the other end of a connection."""
        self.attempt.carry(self.host, peer, data)

    def ended(self, rank: int, code: int) -> None:
        """A rank's end."""
        self.attempt.ended(rank, code)

    def said(self, text: bytes) -> None:
        """A line of what brings commands to the host."""
        self.attempt.said(self.host, text)

    def counted(self, nodes: int) -> None:
        """Nothing: a run has its ranks."""

    def lost(self, reason: str, code: int, reached: bool) -> None:
        """The host cannot be reached, or not any more, or refuses."""
        self.attempt.lost(self.host, reason, code, reached)


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    return signal.Signals(number).name if number in signal.valid_signals() else str(number)
