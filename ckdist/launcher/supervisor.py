"""Runs a job from its first start to its final end: stop signals, restarts with back-off, and the exit code."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckdist.errors import ConfigError
from ckdist.launcher.attempt import Attempt, Outcome
from ckdist.launcher.children import Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.hosts import Host, place_ranks
from ckdist.launcher.job import FULL_RANKS_VARIABLE, Job
from ckdist.launcher.keeper import Keeper
from ckdist.launcher.rank_output import Output
from ckdist.launcher.remote_ranks import SSH, RemoteRanks, agent_words

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; the pause doubles each time
SETTLED_SECONDS = 600.0  # after this run time the count of restarts begins again
AWAIT_SECONDS = 600.0  # limit for a host that was reached before to be reachable again; then it costs a restart
REACH_PAUSE = 5.0  # seconds between two attempts to reach it
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Policy:
    """Limits of restarts and stops."""

    restarts: int = 0  # most restarts in a row
    min_ranks: int | None = None  # least ranks to continue with if hosts cannot be reached; None: all
    stop_seconds: float = 300.0  # limit for ranks to end after a stop signal


class Supervisor:
    """Runs `job` over `hosts`.

    Args:
        agent: Template that starts the agent of a host. None: ssh, and no agent on this host.
        keeper: Holds the weights of this host's ranks. None: made if the job keeps them.
        spares: Hosts that take the ranks of a host that cannot be reached.
        children: Processes that the caller has started. All other children count as left behind by ranks.
        reached: Whether all hosts have been reached before. Then the first start waits for them.
        may_restart: Gets the reason of an end. Ranks start again at once with the variables that it returns; None: they
            do not. Without this function, `policy` decides.

    Raises:
        ConfigError: The template, the hosts or the policy cannot be used.
    """

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        policy: Policy,
        output: Output,
        agent: str | None = None,
        children: Children | None = None,
        reached: bool = False,
        keeper: Keeper | None = None,
        spares: Sequence[Host] = (),
        may_restart: Callable[[str], dict[str, str] | None] | None = None,
    ) -> None:
        self._spares, self._may_restart = list(spares), may_restart
        self._keeper = keeper or (Keeper() if job.keeps else None)
        self._resting: dict[str, RemoteRanks] = {}
        self._job, self._policy, self._output = job, policy, output
        self._placed: Mapping[str, range] = place_ranks(job.size, hosts)
        self._agents: dict[str, Sequence[str] | None] = {
            host.name: None if host.is_this and agent is None else agent_words(agent or SSH, host.name)
            for host in (*hosts, *spares)
        }
        if policy.min_ranks is not None and policy.min_ranks > job.size:
            raise ConfigError(f"--min-ranks ({policy.min_ranks}) is more than the {job.size} ranks of the job")
        self._loop, self._children = EventLoop(), children or Children()
        self._attempt: Attempt | None = None
        self._begun = time.monotonic()  # start of the last attempt
        self._stopped = False
        self._reached = reached  # all hosts have been reached once

    def run(self) -> int:
        """Runs until the job has ended for good. Returns its exit code, 128 + number after a signal."""
        handlers: dict[int, Callable[[int], object]] = {signal.SIGCHLD: lambda _: self._children.reap()}
        handlers |= dict.fromkeys(STOPPING, self._stop) | dict.fromkeys(PASSED_ON, self._pass_on)
        with self._loop.signals(handlers):
            try:
                return self._run_with_restarts()
            finally:
                for host in self._resting.values():
                    host.close()
                if self._keeper is not None:
                    self._keeper.forker.close()

    def _run_with_restarts(self) -> int:
        used, pause = 0, FIRST_PAUSE
        while True:
            outcome = self._run_once()
            if self._may_restart and outcome.again and not self._stopped:
                more = self._may_restart(outcome.reason)
                if more is not None:
                    self._job = replace(self._job, environment=self._job.environment | more)
                    continue
            if time.monotonic() - self._begun > SETTLED_SECONDS:
                used, pause = 0, FIRST_PAUSE
            if self._stopped or not outcome.again or used >= self._policy.restarts:
                self._report_end(outcome, used)
                return outcome.code
            used += 1
            left = f"restart {used} of {self._policy.restarts}"
            self._output.say(f"{outcome.reason}; all ranks start again in {pause:g} s ({left})")
            if self._waited(pause):
                return outcome.code
            pause = min(2 * pause, LONGEST_PAUSE)

    def _run_once(self) -> Outcome:
        """Runs the job once.

        If hosts cannot be reached, continues on the others if they are enough, else waits for all hosts.
        """
        placed = self._placed
        patience, said = time.monotonic() + AWAIT_SECONDS, ""
        while True:
            outcome = self._attempt_on(placed)
            left = [Host(name, len(ranks)) for name, ranks in placed.items() if name not in outcome.unreached and ranks]
            fewer = sum(host.slots or 0 for host in left)
            if self._stopped or not outcome.unreached:
                return outcome
            if (spare := self._take_spare(outcome.unreached[0], placed)) is not None:
                self._output.say(f"{outcome.reason}; {spare} takes its ranks")
                placed = self._placed = {
                    spare if name == outcome.unreached[0] else name: ranks for name, ranks in placed.items()
                }
                continue
            if left and fewer >= (self._policy.min_ranks or self._job.size):
                self._output.say(f"{outcome.reason}; continuing with {fewer} of {self._job.size} ranks")
                placed = place_ranks(fewer, left)
                continue
            if not outcome.again or not self._reached or time.monotonic() > patience:
                return outcome
            if outcome.reason != said:
                minutes = f"{AWAIT_SECONDS / 60:g} minutes"
                self._output.say(f"{outcome.reason}; retrying every {REACH_PAUSE:g} s for {minutes}")
                said = outcome.reason
            if self._waited(REACH_PAUSE):
                return outcome

    def _take_spare(self, lost: str, placed: Mapping[str, range]) -> str | None:
        """Removes the first spare that has slots for the ranks of `lost`, and returns its name."""
        for spare in self._spares:
            if spare.slots is None or spare.slots >= len(placed[lost]):
                self._spares.remove(spare)
                return spare.name
        return None

    def _attempt_on(self, placed: Mapping[str, range]) -> Outcome:
        job, self._begun = replace(self._job, size=sum(map(len, placed.values()))), time.monotonic()
        if job.size < self._job.size:
            began = {FULL_RANKS_VARIABLE: str(self._job.size)}
            job = replace(job, environment=job.environment | began)
        self._attempt = Attempt(
            *(self._loop, self._children, job, placed, self._agents, self._output, self._policy.stop_seconds),
            *(self._keeper, self._resting),
        )
        outcome = self._attempt.run()
        self._attempt = None
        self._reached |= not outcome.unreached
        return outcome

    def _report_end(self, outcome: Outcome, used: int) -> None:
        """Prints why the job has ended, unless a rank that shares this terminal has printed it."""
        if outcome.reason and (self._job.captured or outcome.by_signal or outcome.unreached) and not self._stopped:
            self._output.say(outcome.reason + (f", after {used} restarts" if used else ""))

    def _waited(self, seconds: float) -> bool:
        """Waits before a restart. Returns whether a stop signal has arrived."""
        deadline = time.monotonic() + seconds
        while not self._stopped and self._loop.turn(deadline):
            pass
        return self._stopped

    def _stop(self, number: int) -> None:
        # A terminal's Ctrl-C has already reached a rank 0 that shares the terminal.
        if number == signal.SIGINT and not self._job.captured and _in_foreground():
            return
        self._stopped = True
        if self._attempt is not None:
            self._attempt.stop(signal.SIGTERM if number == signal.SIGHUP else number)

    def _pass_on(self, number: int) -> None:
        if self._attempt is not None:
            self._attempt.signal(number)


def _in_foreground() -> bool:
    """True if a terminal's Ctrl-C reaches this process and its process group."""
    try:
        return sys.stdin is not None and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
