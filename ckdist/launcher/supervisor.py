"""A job from its first start to its last end: signals that drain it, restarts with back-off, its exit code."""

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
from ckdist.launcher.job import Job
from ckdist.launcher.output import Output
from ckdist.launcher.remote_ranks import SSH, agent_words

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; each is twice the last
SETTLED_SECONDS = 600.0  # a job that ran for so long has all its restarts again
AWAIT_SECONDS = 600.0  # that a host may be out of reach, once a run has had it, before that costs a restart
REACH_PAUSE = 5.0  # seconds between two tries to reach it
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Policy:
    """`restarts`: how often in a row a job is started again. `min_ranks`: it goes on with so many at least where hosts
    cannot be reached; None: with all. `stop_seconds`: how long ranks may take to end once they are told to.
    """

    restarts: int = 0
    min_ranks: int | None = None
    stop_seconds: float = 300.0


class Supervisor:
    """Runs `job` over `hosts`, whose agents the template `agent` starts; None: ssh, and nothing for this host.

    `children`: the processes that the caller has started already; others are taken to be left behind by ranks.
    """

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        policy: Policy,
        output: Output,
        agent: str | None = None,
        children: Children | None = None,
    ) -> None:
        """ConfigError for what the user can mend."""
        self._job, self._policy, self._output = job, policy, output
        self._placed = place_ranks(job.size, hosts)
        self._agents: dict[str, Sequence[str] | None] = {
            host.name: None if host.is_this and agent is None else agent_words(agent or SSH, host.name)
            for host in hosts
        }
        if policy.min_ranks is not None and policy.min_ranks > job.size:
            raise ConfigError(f"--min-ranks ({policy.min_ranks}) is more than the {job.size} ranks of the job")
        self._loop, self._children = EventLoop(), children or Children()
        self._attempt: Attempt | None = None
        self._begun = time.monotonic()  # of the last attempt
        self._stopped = self._reached = False  # once: all hosts

    def run(self) -> int:
        """Until the job has ended for good; its exit code, 128 and the signal's number where a signal ended it."""
        handlers: dict[int, Callable[[int], object]] = {signal.SIGCHLD: lambda _: self._children.reap()}
        handlers |= dict.fromkeys(STOPPING, self._stop) | dict.fromkeys(PASSED_ON, self._pass_on)
        with self._loop.signals(handlers):
            used, pause = 0, FIRST_PAUSE
            while True:
                outcome = self._run_once()
                if time.monotonic() - self._begun > SETTLED_SECONDS:
                    used, pause = 0, FIRST_PAUSE
                if self._stopped or not outcome.again or used >= self._policy.restarts:
                    self._tell_end(outcome, used)
                    return outcome.code
                used += 1
                left = f"restart {used} of {self._policy.restarts}"
                self._output.say(f"{outcome.reason}; all ranks start again in {pause:g} s ({left})")
                if self._waited(pause):
                    return outcome.code
                pause = min(2 * pause, LONGEST_PAUSE)

    def _run_once(self) -> Outcome:
        """One run: on fewer hosts where some cannot be reached and those that are left are enough, else once all are
        there again.
        """
        placed: Mapping[str, range] = self._placed
        patience, said = time.monotonic() + AWAIT_SECONDS, ""
        while True:
            outcome = self._attempt_on(placed)
            left = [Host(name, len(ranks)) for name, ranks in placed.items() if name not in outcome.unreached and ranks]
            fewer = sum(host.slots or 0 for host in left)
            if self._stopped or not outcome.unreached:
                return outcome
            if left and fewer >= (self._policy.min_ranks or self._job.size):
                self._output.say(f"{outcome.reason}; going on with {fewer} of {self._job.size} ranks")
                placed = place_ranks(fewer, left)
                continue
            if not outcome.again or not self._reached or time.monotonic() > patience:
                return outcome
            if outcome.reason != said:
                minutes = f"{AWAIT_SECONDS / 60:g} minutes"
                self._output.say(f"{outcome.reason}; tried again every {REACH_PAUSE:g} s for {minutes}")
                said = outcome.reason
            if self._waited(REACH_PAUSE):
                return outcome

    def _attempt_on(self, placed: Mapping[str, range]) -> Outcome:
        """One attempt with these ranks on each host."""
        job, self._begun = replace(self._job, size=sum(map(len, placed.values()))), time.monotonic()
        self._attempt = Attempt(
            self._loop, self._children, job, placed, self._agents, self._output, self._policy.stop_seconds
        )
        outcome = self._attempt.run()
        self._attempt = None
        self._reached |= not outcome.unreached
        return outcome

    def _tell_end(self, outcome: Outcome, used: int) -> None:
        """Why the job has ended, unless a rank of this terminal's has said so itself."""
        if outcome.reason and (self._job.captured or outcome.by_signal or outcome.unreached) and not self._stopped:
            self._output.say(outcome.reason + (f", after {used} restarts" if used else ""))

    def _waited(self, seconds: float) -> bool:
        """Waits before a restart; whether a signal came meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._stopped and self._loop.turn(deadline):
            pass
        return self._stopped

    def _stop(self, number: int) -> None:
        """A signal that asks for the end. A terminal's Ctrl-C has reached rank 0 already, where that shares it."""
        if number == signal.SIGINT and not self._job.captured and _in_foreground():
            return
        self._stopped = True
        if self._attempt is not None:
            self._attempt.stop(signal.SIGTERM if number == signal.SIGHUP else number)

    def _pass_on(self, number: int) -> None:
        if self._attempt is not None:
            self._attempt.signal(number)


def _in_foreground() -> bool:
    """Whether the terminal's Ctrl-C goes to this process and those that share its group."""
    try:
        return sys.stdin is not None and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
