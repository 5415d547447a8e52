"""One replica of a server in simulated time: the server's scheduler and block pool, and a clock.

`ckdist.engine.scheduler` decides which tokens a step computes, as in a server. Only the duration of the step comes from
a `StepCost`. Between arrivals and ends, steps that each decode one token of every sequence are simulated at once
(`Replica._decode_on`). They allocate the same blocks in the same order. Their durations are interpolated linearly from
the first of at most MOST_STEPS steps to the last.
"""

import bisect
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.scheduler import EngineBusy, Scheduler
from ckdist.engine.sequence import Sequence as EngineSequence
from ckdist.engine.step_builder import Step
from ckdist.plan.load import NO_PREFIX
from ckdist.plan.observed import FAILED, FINISHED, REFUSED, Observed
from ckdist.plan.step_cost import StepCost, StepTotals
from ckdist.program.stage_costs import StageCosts
from ckdist.program.step_batch import BLOCK_TOKENS

MOST_STEPS = 512  # steps that are taken at once
NO_SAMPLING = SamplingParams()


@dataclass(frozen=True)
class ServerShape:
    """Settings of a replica, as of `ckdist serve`."""

    max_tokens: int = 512  # of a step
    max_sequences: int = 8  # at once
    context: int = 8192  # positions of one sequence
    cache_tokens: int = 65536  # positions in the cache
    max_waiting: int = 512  # requests in the queue
    max_step_seconds: float = math.inf  # of a step with prompts while a sequence decodes
    prefix_reuse: bool = True
    stages: int = 1
    stage_hop: float = 0.0  # seconds of a row from a stage to the next
    front_end: float = 0.0  # seconds of a request to the scheduler and of its first token back to the client


@dataclass(slots=True, eq=False)
class Journey:
    """A request and its times. `owner`: the client that waits for it, in a closed loop."""

    arrival: float
    owner: int = -1
    first: float = math.inf
    last: float = math.inf


class Stretch(NamedTuple):
    """Successive steps from time `begin` on. Step i takes first + more * (i - 1) seconds, i = 1, 2, ..."""

    begin: float
    first: float
    more: float

    def gap(self, step: int) -> float:
        """Returns the seconds of step number `step`; the first is 1."""
        return self.first + self.more * (step - 1)

    def end(self, steps: int) -> float:
        """Returns the time at which `steps` steps are done."""
        return self.begin + steps * self.first + self.more * (steps * (steps - 1) / 2)

    def ended_before(self, until: float, most: int) -> int:
        """Returns how many of `most` steps are done before `until`."""
        if self.end(most) < until:
            return most
        return bisect.bisect_left(range(1, most + 1), until, key=self.end)


class Replica:
    """Takes requests in order of arrival. `clock` is the time of its next scheduling.

    Args:
        shape: Settings of the server.
        cost: Predicts the seconds of a step.
        failures: Times of its failures, ascending.
        restart: Seconds from a failure until it takes requests again.
    """

    def __init__(
        self, shape: ServerShape, cost: StepCost, failures: Sequence[float] = (), restart: float = 0.0
    ) -> None:
        self.shape, self.cost, self.seen = shape, cost, Observed()
        self.clock, self.down_until = 0.0, 0.0
        self.ended: list[Journey] = []  # ended requests, since the caller emptied it
        self._failures, self._restart = deque(failures), restart
        self._count = 0  # of requests, for tokens that differ between requests
        self._begin()

    def _begin(self) -> None:
        """Starts the server with an empty cache."""
        shape = self.shape
        self._scheduler = Scheduler(
            BlockPool(shape.cache_tokens // BLOCK_TOKENS), shape.max_tokens, shape.max_sequences, shape.max_tokens,
            shape.max_waiting, shape.prefix_reuse, StageCosts(shape.stages), max_step_seconds=shape.max_step_seconds,
            clock=lambda: self.clock,
        )  # fmt: skip
        self._under_way: deque[tuple[Step, float]] = deque()  # (issued step, time of its end)
        self._stage_free = [self.clock] * shape.stages

    @property
    def outstanding(self) -> int:
        """The number of requests that are waiting or running."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def add(self, request: Journey, prompt: int, output: int, prefix: int = NO_PREFIX, prefix_tokens: int = 0) -> None:
        """Adds a request that arrives. Call `advance` up to its time at the scheduler before.

        The request is refused if the server is down, if the queue is full, or if its prompt and a token exceed the
        context. Its output ends at the end of the context.
        """
        self._count += 1
        at = self.time_of(request.arrival)
        if at < self.down_until or prompt + 1 > self.shape.context:
            self._end(request, at, (prompt, 0, 0), REFUSED)
            return
        sequence = self._sequence(request, prompt, min(prompt + output, self.shape.context), (prefix, prefix_tokens))
        try:
            self._scheduler.add(sequence)
        except EngineBusy:
            self._end(request, at, (prompt, 0, 0), REFUSED)
            return
        self.seen.waiting += max(0.0, self.clock - at)
        self.clock = max(self.clock, at)

    def time_of(self, arrival: float) -> float:
        """Returns the time at which a request with this arrival reaches the scheduler."""
        return arrival + self.shape.front_end

    def _sequence(self, request: Journey, prompt: int, length: int, prefix: tuple[int, int]) -> EngineSequence:
        """Returns the scheduler's sequence of a request.

        The identity of a block includes the block before it. So one token that no other request has, after the shared
        prefix, makes all blocks from there on unique.
        """
        number, shared = prefix
        sequence = EngineSequence(request, np.zeros(prompt, np.int32), NO_SAMPLING, 0, length, request.arrival)
        sequence.tokens[prompt:] = 0
        sequence.tokens[min(shared, length - 1)] = self._count
        if shared:
            sequence.tokens[0] = -1 - number
        return sequence

    def advance(self, until: float) -> bool:
        """Takes steps that begin before `until`. Returns False if there are no more.

        If requests end, it stops there and returns True. They are in `ended`.
        """
        while self.clock < until and (self._under_way or self._issue()):
            while len(self._under_way) < self.shape.stages and self._issue():
                pass
            if self._failures and self._under_way[0][1] > self._failures[0]:
                self._fail()
            elif self._collect():
                self._decode_on(until)
            if self.ended:
                return True
        while not self.outstanding and self._failures and self._failures[0] <= until:
            self._fail()
        return False

    def next_change(self, now: float) -> float:
        """Returns a time after `now` until which `outstanding` and the replica's state (up or down) do not change.

        It assumes that no step is faster than one of a single token.
        """
        times = [self.down_until] if self.down_until > now else [*self._failures][:1]
        if self.outstanding:
            least = self.cost.seconds(StepTotals(decodes=1, decode_context=1, outputs=1))
            left = min((len(s.tokens) - s.length for s in self._scheduler.running), default=1)
            times = [*times, self.clock if self._under_way else self.clock + left * least]
        return max(min(times, default=math.inf), math.nextafter(now, math.inf))

    def _issue(self) -> bool:
        """Issues a step. Returns False if there is nothing to compute."""
        preempted = self._scheduler.preemptions
        step = self._scheduler.schedule()
        self.seen.preemptions += self._scheduler.preemptions - preempted
        if step is None:
            return False
        seconds = self.cost.seconds(totals_of(step))
        self._scheduler.commit(step)
        self._scheduler.speed.observe(step.chunks, seconds)
        for chunk in step.chunks:
            chunk.sequence.in_flight += 1
        part, hop = seconds / self.shape.stages, self.shape.stage_hop
        done = self.clock - hop
        for stage, free in enumerate(self._stage_free):
            self._stage_free[stage] = done = max(done + hop, free) + part
        self._under_way.append((step, done))
        self.seen.busy += seconds
        return True

    def _collect(self) -> bool:
        """Ends the oldest step. Returns whether the next steps decode exactly one token of each running sequence.

        That is so if all running sequences got a token in this step, and either none waits, or this step also decoded
        only one token of each and none ended.
        """
        step, done = self._under_way.popleft()
        self._pass(done)
        gaps: Counter[float] = Counter()
        running, decoded, going_on = len(self._scheduler.running), len(step.chunks), 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.in_flight -= 1
            decoded -= chunk.tokens > 1
            if not chunk.samples:
                continue
            request: Journey = sequence.id  # type: ignore[assignment]
            if request.first == math.inf:
                request.first = done
            else:
                gaps[done - request.last] += 1
            request.last = done
            sequence.length += 1
            if sequence.length == len(sequence.tokens):
                self._finish(sequence, request)
            else:
                going_on += 1
        for gap, count in gaps.items():
            self.seen.gaps.add(gap, count)
        runs = len(self._scheduler.running)
        return going_on == runs and (not self._scheduler.waiting or decoded == running == runs)

    def _pass(self, done: float) -> None:
        """Moves the clock to the end of a step."""
        seconds = max(0.0, done - self.clock)
        waiting = len(self._scheduler.waiting)
        self.seen.waiting += waiting * seconds
        self.seen.running += len(self._scheduler.running) * seconds
        self.seen.longest_queue = max(self.seen.longest_queue, waiting)
        self.seen.steps += 1
        self.clock = max(self.clock, done)

    def _decode_on(self, until: float) -> None:
        """Takes the next steps that each decode one token of all running sequences, if they begin before `until`.

        They end with the first step in which a sequence ends. Waiting sequences could not be admitted so far, and
        cannot be until one ends.
        """
        running = self._scheduler.running
        steps = min(MOST_STEPS, min((len(s.tokens) - s.length for s in running), default=0))
        blocks = sum(-(-(s.length + steps - 1) // BLOCK_TOKENS) - s.num_blocks for s in running)
        if self.shape.stages > 1 or steps < 2 or blocks > self._scheduler.pool.available:
            return
        count, context = len(running), sum(s.length for s in running)
        first, last = (
            self.cost.seconds(StepTotals(0, 0, count, context + done * count, count)) for done in (0, steps - 1)
        )
        stretch = Stretch(self.clock, first, (last - first) / (steps - 1))
        taken = min(steps, 1 + stretch.ended_before(until, steps))
        if self._failures:
            taken = min(taken, stretch.ended_before(self._failures[0], steps))
        if taken < 2:
            return
        decode_together(self._scheduler, taken)
        self.seen.gaps.add_line(first, stretch.gap(taken), taken, count)
        self.seen.busy += stretch.end(taken) - self.clock
        self.seen.steps += taken - 1
        self._pass(stretch.end(taken))
        self._stage_free[0] = self.clock
        for sequence in tuple(running):
            request: Journey = sequence.id  # type: ignore[assignment]
            request.last = self.clock
            if sequence.length == len(sequence.tokens):
                self._finish(sequence, request)

    def _finish(self, sequence: EngineSequence, request: Journey) -> None:
        self._scheduler.remove(sequence)
        prompt = len(sequence.prompt)
        counts = prompt, sequence.length - prompt, sequence.cached_tokens or 0
        self._end(request, request.last, counts, FINISHED)

    def _fail(self) -> None:
        """Loses all requests and the cache, and starts the server again."""
        at = self._failures.popleft()
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            request: Journey = sequence.id  # type: ignore[assignment]
            prompt = len(sequence.prompt)
            self._end(request, at, (prompt, sequence.length - prompt, sequence.cached_tokens or 0), FAILED)
        self.seen.failures += 1
        self.clock = self.down_until = at + self._restart
        self._begin()

    def _end(self, request: Journey, at: float, counts: tuple[int, int, int], how: int) -> None:
        """Records the end of a request."""
        self.seen.rows.append((request.arrival, request.first, at, *counts, how))
        self.seen.end = max(self.seen.end, at)
        self.ended.append(request)


def totals_of(step: Step) -> StepTotals:
    """Returns the totals of a step, which determine its cost."""
    prompt = attended = decodes = context = outputs = 0
    for _, first, tokens, _, rows, *_ in step.chunks:
        outputs += rows
        if tokens == 1:
            decodes, context = decodes + 1, context + first + 1
        else:
            prompt, attended = prompt + tokens, attended + tokens * first + tokens * (tokens + 1) // 2
    return StepTotals(prompt, attended, decodes, context, outputs)


def decode_together(scheduler: Scheduler, steps: int) -> None:
    """Has the effect of `steps` times `schedule` and `commit`, each with one token of all running sequences.

    No sequence may wait for a block meanwhile. The same blocks are allocated; the order among sequences does not
    matter.
    """
    for sequence in scheduler.running:
        sequence.computed += steps
        sequence.length += steps
        if sequence.num_blocks * BLOCK_TOKENS < sequence.computed:
            scheduler.append_blocks(sequence, -(-sequence.computed // BLOCK_TOKENS) - sequence.num_blocks)
        if (sequence.shared_blocks + 1) * BLOCK_TOKENS <= sequence.computed:
            scheduler.share_blocks(sequence)
