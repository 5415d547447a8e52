"""Simulates many replicas behind a router.

`random` and `round-robin` ignore the load of replicas. So every replica is simulated on its own, with one process per
core, and of identical replicas it is enough to simulate a sample. `least` sends a request to the replica with the
fewest requests, so all replicas advance together. A router knows which replicas are down. The same seed gives the same
results for every number of processes.
"""

import heapq
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from ckdist.plan.load import RequestKind, Requests
from ckdist.plan.observed import Observed
from ckdist.plan.replica import Journey, Replica, ServerShape
from ckdist.plan.step_cost import StepCost

LEAST_REQUESTS = 20_000  # fewest requests for which further processes pay off
TASKS = 4  # per process, so that all finish at about the same time
MOST_SECONDS = 6 * 3600.0  # limit of real time for a process
RETRY_SECONDS = 1.0  # shortest time until a refused client tries again
DOWN = 1 << 62  # load of a replica that takes no requests
TRIES = 64  # attempts of the router to find a replica that is up


@dataclass(frozen=True)
class Fleet:
    """Identical replicas behind a router."""

    replicas: int
    server: ServerShape
    cost: StepCost
    router: str = "round-robin"
    failure_seconds: float = math.inf  # mean seconds of work from a start to the next failure; inf: never
    restart: float = 60.0  # seconds from a failure until the replica is up again
    sample: int = 0  # number of replicas to simulate; 0: all
    seed: int = 0
    jobs: int = 1

    @property
    def simulated(self) -> int:
        """The number of replicas that are simulated."""
        return min(self.sample or self.replicas, self.replicas)

    def failures(self, replica: int, seconds: float) -> list[float]:
        """Returns the times of a replica's failures within `seconds`."""
        found, at = list[float](), 0.0
        if not math.isfinite(self.failure_seconds):
            return found
        rng = np.random.default_rng([self.seed, 1, replica])
        while (at := at + rng.exponential(self.failure_seconds)) < seconds:
            found.append(at)
            at += self.restart
        return found

    def replica(self, number: int, seconds: float) -> Replica:
        """Returns a new replica."""
        return Replica(self.server, self.cost, self.failures(number, seconds), self.restart)


@dataclass(frozen=True)
class ClosedLoop:
    """Clients that send a request only after the answer to their last one.

    A client stays with its replica.
    """

    clients: int  # of all replicas
    kind: RequestKind
    think: float = 0.0  # mean seconds from an answer to the next request


def simulate_requests(fleet: Fleet, requests: Requests, seconds: float) -> Observed:
    """Simulates requests that arrive within `seconds`, until all have ended."""
    if fleet.router == "least":
        return _least(fleet, requests, seconds)
    chosen = route(fleet, requests.arrival, seconds)
    order = np.argsort(chosen, kind="stable")
    ends = np.searchsorted(chosen[order], np.arange(fleet.simulated + 1))
    parts = [requests[order[ends[i] : ends[i + 1]]] for i in range(fleet.simulated)]
    many = int(ends[-1]) >= LEAST_REQUESTS
    return _in_processes(fleet, many, lambda numbers: (_open_part, fleet, [parts[i] for i in numbers], seconds))


def simulate_clients(fleet: Fleet, loop: ClosedLoop, seconds: float) -> Observed:
    """Simulates clients that send requests for `seconds`, until all requests have ended."""
    many = seconds * fleet.simulated >= LEAST_REQUESTS
    return _in_processes(fleet, many, lambda _: (_closed_part, fleet, loop, seconds))


def route(fleet: Fleet, arrival: np.ndarray, seconds: float) -> np.ndarray:
    """Returns the replica of each request, int64 (requests,). `arrival` is ascending."""
    rng = np.random.default_rng([fleet.seed, 2])
    count, random = len(arrival), fleet.router == "random"
    chosen = rng.integers(0, fleet.replicas, count) if random else np.arange(count) % fleet.replicas
    if not math.isfinite(fleet.failure_seconds):
        return chosen
    downs = [(r, at) for r in range(fleet.replicas) for at in fleet.failures(r, seconds)]
    if not downs:
        return chosen
    # The times of replica r begin at r * length, so that one search finds a request's replica and time.
    length = seconds + fleet.restart + 1.0
    begins = np.array([r * length + at for r, at in downs])

    def is_down(which: np.ndarray) -> np.ndarray:
        """Bool (requests,): True if the chosen replica of a request is down as it arrives."""
        at = chosen[which] * length + arrival[which]
        last = np.searchsorted(begins, at, side="right") - 1
        return (last >= 0) & (at - begins[np.maximum(last, 0)] < fleet.restart)

    which = np.arange(count)
    for _ in range(TRIES):
        which = which[is_down(which)]
        if not len(which):
            break
        chosen[which] = rng.integers(0, fleet.replicas, len(which)) if random else (chosen[which] + 1) % fleet.replicas
    return chosen


def _in_processes(fleet: Fleet, many: bool, part_of: Callable[[range], tuple[Any, ...]]) -> Observed:
    """Simulates groups of replicas and adds up their results, in order.

    `part_of` returns, for a group, a function and its arguments after the first, which is the group.
    """
    jobs = min(fleet.jobs, fleet.simulated) if many else 1
    groups = np.array_split(np.arange(fleet.simulated), min(fleet.simulated, jobs * TASKS) if jobs > 1 else 1)
    ranges = [range(int(group[0]), int(group[-1]) + 1) for group in groups]
    tasks = [(function, numbers, rest) for numbers in ranges for function, *rest in (part_of(numbers),)]
    total = Observed()
    if jobs == 1:
        for function, numbers, rest in tasks:
            total.add(function(numbers, *rest))
        return total
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(function, numbers, *rest) for function, numbers, rest in tasks]:
            total.add(future.result(timeout=MOST_SECONDS))
    return total


def _open_part(numbers: range, fleet: Fleet, parts: list[Requests], seconds: float) -> Observed:
    """Simulates replicas one after the other, each with its requests."""
    total = Observed()
    for number, requests in zip(numbers, parts, strict=True):
        replica = fleet.replica(number, seconds)
        for arrival, *rest in requests.tolist():
            _advance(replica, replica.time_of(arrival))
            replica.add(Journey(arrival), *rest)
        _advance(replica, math.inf)
        total.add(replica.seen)
    return total


def _advance(replica: Replica, until: float) -> None:
    """Advances a replica to `until`. Nobody waits for its ended requests."""
    while replica.advance(until):
        replica.ended.clear()


def _closed_part(numbers: range, fleet: Fleet, loop: ClosedLoop, seconds: float) -> Observed:
    """Simulates replicas one after the other, each with its clients."""
    total = Observed()
    for number in numbers:
        replica = fleet.replica(number, seconds)
        _closed_replica(replica, loop, np.random.default_rng([fleet.seed, 3, number]), seconds, fleet, number)
        total.add(replica.seen)
    return total


def _closed_replica(
    replica: Replica, loop: ClosedLoop, rng: np.random.Generator, seconds: float, fleet: Fleet, number: int
) -> None:
    """Simulates one replica and its clients. The first client is `number`."""
    think = lambda: rng.exponential(loop.think) if loop.think else 0.0
    asking = [(think(), client) for client in range(number, loop.clients, fleet.replicas)]
    heapq.heapify(asking)
    while asking or replica.outstanding:
        at, client = asking[0] if asking else (math.inf, -1)
        if not replica.advance(replica.time_of(at)) and asking:
            heapq.heappop(asking)
            requests = loop.kind.draw(rng, np.array([at]))
            replica.add(Journey(at, client), *requests.tolist()[0][1:])
        for request in replica.ended:
            refused = request.first == math.inf
            end = max(replica.down_until, request.arrival + RETRY_SECONDS) if refused else request.last
            if (again := max(end, replica.down_until) + think()) < seconds:
                heapq.heappush(asking, (again, request.owner))
        replica.ended.clear()


def _least(fleet: Fleet, requests: Requests, seconds: float) -> Observed:
    """Simulates all replicas together. A request goes to the first one that is up and has the fewest requests.

    A replica only advances if it gets a request, or if the number of its requests may change.
    """
    replicas = [fleet.replica(number, seconds) for number in range(fleet.replicas)]
    due = [(0.0, number) for number in range(fleet.replicas)]
    load = np.zeros(fleet.replicas, np.int64)
    for arrival, *rest in requests.tolist():
        now = replicas[0].time_of(arrival)
        while due[0][0] <= now:
            number = heapq.heappop(due)[1]
            replica = replicas[number]
            _advance(replica, now)
            load[number] = replica.outstanding if replica.down_until <= now else DOWN
            heapq.heappush(due, (replica.next_change(now), number))
        number = int(load.argmin())
        replica = replicas[number]
        _advance(replica, now)
        replica.add(Journey(arrival), *rest)
        load[number] = replica.outstanding if load[number] != DOWN else DOWN
        heapq.heappush(due, (replica.next_change(now), number))
    total = Observed()
    for replica in replicas:
        _advance(replica, math.inf)
        total.add(replica.seen)
    return total
