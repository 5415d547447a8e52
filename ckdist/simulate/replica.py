"""One replica of a server in simulated time: the scheduler and the pool of blocks that serve, and a clock.

Which tokens a step computes is decided by `ckdist.engine.scheduler` as in a server; only what the step costs is asked
of a `StepCost`. Between arrivals and ends a stretch of steps that each decode one token of every sequence is taken at
once (`Replica._decode_on`): the same blocks are found in the same order, and costs are on a line from the first of at
most MOST_STEPS steps to the last.
"""

import bisect
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.sampling import SamplingParams
from ckdist.engine.scheduler import EngineBusy, Scheduler, Step
from ckdist.engine.sequence import Sequence as EngineSequence
from ckdist.planning.step_cost import StepCost, StepTotals
from ckdist.program.batch import BLOCK_TOKENS
from ckdist.program.stage_costs import StageCosts
from ckdist.simulate.load import NO_PREFIX
from ckdist.simulate.observed import FAILED, FINISHED, REFUSED, Observed

MOST_STEPS = 512  # that are taken at once
NO_SAMPLING = SamplingParams()


@dataclass(frozen=True)
class ServerShape:
    """What a replica is started with, as of `ckdist serve`: tokens of a step, sequences at once, positions of one
    sequence and of the cache, the queue, stages, and seconds in which a row goes from a stage to the next.

    `front_end`: seconds in which a request gets to the scheduler and its first token back to the client.
    """

    max_tokens: int = 512
    max_sequences: int = 8
    context: int = 8192
    cache_tokens: int = 65536
    max_waiting: int = 512
    prefix_reuse: bool = True
    stages: int = 1
    stage_hop: float = 0.0
    front_end: float = 0.0


@dataclass(slots=True, eq=False)
class Journey:
    """A request on its way; `owner`: of a closed loop, the client that waits for it."""

    arrival: float
    owner: int = -1
    first: float = math.inf
    last: float = math.inf


class Stretch(NamedTuple):
    """Steps one after the other from `begin` on: the first takes `first` seconds, each other one `more` than the one
    before.
    """

    begin: float
    first: float
    more: float

    def gap(self, step: int) -> float:
        """Seconds of a step; the first is 1."""
        return self.first + self.more * (step - 1)

    def end(self, steps: int) -> float:
        """When so many steps are done."""
        return self.begin + steps * self.first + self.more * (steps * (steps - 1) / 2)

    def ended_before(self, until: float, most: int) -> int:
        """How many of `most` steps are done before `until`."""
        if self.end(most) < until:
            return most
        return bisect.bisect_left(range(1, most + 1), until, key=self.end)


class Replica:
    """Takes requests in order of arrival. `clock`: when it decides next what to compute."""

    def __init__(
        self, shape: ServerShape, cost: StepCost, failures: Sequence[float] = (), restart: float = 0.0
    ) -> None:
        """failures: when it fails, ascending; `restart` seconds later it takes requests again."""
        self.shape, self.cost, self.seen = shape, cost, Observed()
        self.clock, self.down_until = 0.0, 0.0
        self.ended: list[Journey] = []  # since the caller emptied it
        self._failures, self._restart = deque(failures), restart
        self._count = 0  # of requests, which makes their tokens unlike one another
        self._begin()

    def _begin(self) -> None:
        """Starts the server, with nothing in its cache."""
        shape = self.shape
        self._scheduler = Scheduler(
            BlockPool(shape.cache_tokens // BLOCK_TOKENS), shape.max_tokens, shape.max_sequences, shape.max_tokens,
            shape.max_waiting, shape.prefix_reuse, StageCosts(shape.stages),
        )  # fmt: skip
        self._under_way: deque[tuple[Step, float]] = deque()  # issued, and when it is done
        self._stage_free = [self.clock] * shape.stages

    @property
    def outstanding(self) -> int:
        """Requests that are waiting or running."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def add(self, request: Journey, prompt: int, output: int, prefix: int = NO_PREFIX, prefix_tokens: int = 0) -> None:
        """A request arrives, with so many tokens. `advance` has come to its time at the scheduler before.

        It is refused where the server is down, the queue is full, or the prompt and a token are longer than the
        context; an output ends at the context's.
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
        """When a request that arrives then is at the scheduler."""
        return arrival + self.shape.front_end

    def _sequence(self, request: Journey, prompt: int, length: int, prefix: tuple[int, int]) -> EngineSequence:
        """The scheduler's view of a request. A block is known by the one before it, so one token that no other request
        has makes all from there on its own.
        """
        number, shared = prefix
        sequence = EngineSequence(request, np.zeros(prompt, np.int32), NO_SAMPLING, 0, length, request.arrival)
        sequence.tokens[prompt:] = 0
        sequence.tokens[min(shared, length - 1)] = self._count
        if shared:
            sequence.tokens[0] = -1 - number
        return sequence

    def advance(self, until: float) -> bool:
        """Takes the next steps if they begin before `until`; False where there are none.

        Stops where requests have ended, which are in `ended`.
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
        """A time up to which `outstanding` stays as it is, and the replica up or down: behind `now`, where no step is
        quicker than one of a single token.
        """
        times = [self.down_until] if self.down_until > now else [*self._failures][:1]
        if self.outstanding:
            least = self.cost.seconds(StepTotals(decodes=1, decode_context=1, outputs=1))
            left = min((len(s.tokens) - s.length for s in self._scheduler.running), default=1)
            times = [*times, self.clock if self._under_way else self.clock + left * least]
        return max(min(times, default=math.inf), math.nextafter(now, math.inf))

    def _issue(self) -> bool:
        """Issues a step; False where there is nothing to compute."""
        preempted = self._scheduler.preemptions
        step = self._scheduler.schedule()
        self.seen.preemptions += self._scheduler.preemptions - preempted
        if step is None:
            return False
        seconds = self.cost.seconds(totals_of(step))
        self._scheduler.commit(step)
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
        """Takes what the oldest step brings; whether the next steps decode a token of all that runs and no more: all of
        it has a token of this step, and none waits, or this one did no more either and none has ended.
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
        """The clock moves to the end of a step."""
        seconds = max(0.0, done - self.clock)
        waiting = len(self._scheduler.waiting)
        self.seen.waiting += waiting * seconds
        self.seen.running += len(self._scheduler.running) * seconds
        self.seen.longest_queue = max(self.seen.longest_queue, waiting)
        self.seen.steps += 1
        self.clock = max(self.clock, done)

    def _decode_on(self, until: float) -> None:
        """Takes the steps that come next where each decodes one token of all that runs, up to the first in which one
        ends, if they begin before `until`. What waits could not be admitted, and cannot be while nothing ends.
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
        """A request has all its tokens."""
        self._scheduler.remove(sequence)
        prompt = len(sequence.prompt)
        counts = prompt, sequence.length - prompt, sequence.cached_tokens or 0
        self._end(request, request.last, counts, FINISHED)

    def _fail(self) -> None:
        """All requests and the cache are lost, and the server starts again."""
        at = self._failures.popleft()
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            request: Journey = sequence.id  # type: ignore[assignment]
            prompt = len(sequence.prompt)
            self._end(request, at, (prompt, sequence.length - prompt, sequence.cached_tokens or 0), FAILED)
        self.seen.failures += 1
        self.clock = self.down_until = at + self._restart
        self._begin()

    def _end(self, request: Journey, at: float, counts: tuple[int, int, int], how: int) -> None:
        """Keeps what became of a request."""
        self.seen.rows.append((request.arrival, request.first, at, *counts, how))
        self.seen.end = max(self.seen.end, at)
        self.ended.append(request)


def totals_of(step: Step) -> StepTotals:
    """What is in a step, for its price."""
    prompt = attended = decodes = context = outputs = 0
    for _, first, tokens, _, rows in step.chunks:
        outputs += rows
        if tokens == 1:
            decodes, context = decodes + 1, context + first + 1
        else:
            prompt, attended = prompt + tokens, attended + tokens * first + tokens * (tokens + 1) // 2
    return StepTotals(prompt, attended, decodes, context, outputs)


def decode_together(scheduler: Scheduler, steps: int) -> None:
    """What so many times `schedule` and `commit` do where each decodes one token of all that runs, and none waits for
    a block. The same blocks are found; which of them a sequence has is of no account.
    """
    for sequence in scheduler.running:
        sequence.computed += steps
        sequence.length += steps
        if sequence.num_blocks * BLOCK_TOKENS < sequence.computed:
            scheduler.append_blocks(sequence, -(-sequence.computed // BLOCK_TOKENS) - sequence.num_blocks)
        if (sequence.shared_blocks + 1) * BLOCK_TOKENS <= sequence.computed:
            scheduler.share_blocks(sequence)


__all__ = ["Journey", "Replica", "ServerShape", "Stretch", "decode_together", "totals_of"]
