"""Chooses the tokens of the next step: continuous batching over a pool of KV blocks.

It knows no logits, text or arrays; `BatchBuilder` builds the arrays. Each step has a budget of tokens and of outputs.
It takes first one token for every decoding sequence, then chunks of prompts in the turns of their clients
(`RequestQueue`). While a sequence decodes, the chunks also have a budget of predicted seconds. So a long prompt never
stalls the running sequences. Steps with logits and steps with hidden states alternate if both are wanted. When the
blocks run out, the sequence that is last in rank gives its blocks back. It is recomputed later, output included. A
sequence whose prefix comes from disk is in no queue until then, so others pass it.

Ranks run steps in the order of issue, so later steps treat an issued step as computed. A sequence only waits for the
token that its last chunk chooses. With several stages, several steps are under way. Each takes its part of the
sequences and a shorter piece of prompts, so that every stage has work.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from ckdist.engine.block_pool import ROOT, BlockPool, match_end
from ckdist.engine.live_requests import LiveRequests
from ckdist.engine.request_queue import RequestQueue
from ckdist.engine.sequence import Sequence, State, shared_blocks
from ckdist.engine.sequence_state import SequenceState
from ckdist.engine.step_builder import Step, StepBuilder
from ckdist.engine.step_speed import StepSpeed
from ckdist.errors import RequestError
from ckdist.program.stage_costs import PIECE_UNIT, StageCosts
from ckdist.program.step_batch import BLOCK_TOKENS, NO_SLOT

if TYPE_CHECKING:
    from ckdist.engine.disk_tier import DiskTier
    from ckdist.engine.drafting import Drafting
    from ckdist.engine.step_builder import SequenceChunk

# a prompt waits for a shared prefix that is being computed if that is this many blocks longer than the known one
MIN_AWAITED_BLOCKS = 4
# After this time, no sequence of a client with an equal or larger share passes a sequence that finds too few blocks.
PASSING_SECONDS = 10.0


class EngineBusy(RequestError):  # noqa: N818, a state and no fault
    """The queue is full. The request may be sent again later (HTTP 429)."""


class Scheduler:
    """Moves sequences from waiting to running to finished.

    `running` is in the order of `RequestQueue.rank`.

    Args:
        max_tokens: Most tokens of a step.
        max_outputs: Most rows of logits of a step.
        max_waiting: Length of the queue.
        costs: Costs of stages that work on several steps at once.
        whole_prompts: For encoders: each prompt is computed in one step and has at most `max_tokens` tokens. No blocks
            are left for other sequences.
        splits_roles: Prompts have other products than generated tokens. A step has tokens of one role, and names of
            blocks contain the role. So the bits of a token depend on its role alone.
        max_step_seconds: Predicted seconds of a step with prompts while a sequence decodes.
        clock: Seconds, for the time that a sequence waits.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_tokens: int,
        max_sequences: int,
        max_outputs: int,
        max_waiting: int,
        prefix_reuse: bool = True,
        costs: StageCosts | None = None,
        whole_prompts: bool = False,
        splits_roles: bool = False,
        max_step_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = costs or StageCosts()
        self.pool, self.max_tokens, self.max_outputs, self.max_waiting = pool, max_tokens, max_outputs, max_waiting
        self.max_sequences = min(max_sequences, max_tokens, max_outputs)  # a step can decode all running sequences
        self.splits_roles = splits_roles
        self.prefix_reuse, self.whole_prompts = prefix_reuse and not whole_prompts, whole_prompts
        self.max_step_seconds, self._clock = max_step_seconds, clock
        self.shares_cores = False  # sequences of other engines wait for this one's steps
        self.speed, self._live = StepSpeed(), LiveRequests(clock)
        self.waiting = RequestQueue(self.max_sequences, pool.num_blocks)
        self.running: list[Sequence] = []
        self.preemptions = 0  # for want of blocks
        self.displaced = 0  # preempted in favour of waiting sequences
        self.tier: DiskTier | None = None
        self.drafting: Drafting | None = None
        self._hidden_running = 0  # running sequences that want hidden states
        self._last_hidden = self._last_prompts = False  # the last step's: hidden states; prompts, if roles are split
        self._piece_work = 0.0  # work of a piece of prompts, until none is left

    @property
    def queued(self) -> int:
        """Sequences that wait for their turn or for the disk."""
        return len(self.waiting) + (self.tier.loading if self.tier is not None else 0)

    def check_room(self) -> None:
        """Raises EngineBusy if the queue is full."""
        if self.queued >= self.max_waiting:
            raise EngineBusy(f"{self.queued} requests are waiting, of at most {self.max_waiting}; try again later")

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            EngineBusy: The queue is full.
        """
        self.check_room()
        sequence.resumes = sequence.length > len(sequence.prompt)
        self._live.see(sequence)
        self.waiting.add(sequence)

    def schedule(self) -> Step | None:
        """Returns the next step, or None if there is nothing to do. If roles are split, their steps alternate."""
        if self.tier is not None and self.tier.resumes and not self.running:
            return None  # so that the streams of a lost engine go on together
        hidden = self._next_is_hidden()
        if not self.splits_roles or hidden:
            return self._schedule(hidden, None)
        turn = not self._last_prompts
        for prompts in (turn, not turn, turn):  # a turn of prompts may admit a sequence that goes on after its prompt
            if step := self._schedule(hidden, prompts):
                self._last_prompts = prompts
                return step
        return None

    def _schedule(self, hidden: bool, role: bool | None) -> Step | None:
        """The next step of a role: prompts, generated tokens (False) or both (None)."""
        step = StepBuilder(self.max_tokens, self.max_outputs, self.whole_prompts, role)
        self._admit_in_turn(hidden, role)
        self.waiting.rank(self.running)
        most_decoding = self._most_decoding()
        prompts: list[Sequence] = []
        # A token for each decoding sequence. Preemption may shorten `running` in the loop, at its end.
        for sequence in self._live.first(self.running):
            left = sequence.length - sequence.computed
            if left <= 0 or not _fits(sequence, hidden, role) or not self._extend(sequence):
                continue
            if left > 1:  # a prompt, or tokens that a grammar has forced
                prompts.append(sequence)
            elif len(step.chunks) < most_decoding:
                step.add(sequence)
        if self.costs.stages > 1:
            step.budget = self._piece_budget(step.tokens)
        if (self._has_decoding or self.shares_cores) and not self.whole_prompts:
            step.limit_seconds(self.max_step_seconds, self.speed.decode_seconds)
        step.batch_seconds = self._live.batch_seconds(self.running, self.max_step_seconds)
        # Chunks of running prompts, then of prompts from the queue.
        for sequence in self.waiting.order(prompts):
            self._add_prompt(step, sequence)
        while role is not False and step.has_room and (sequence := self._admit_next()) is not None:
            if _fits(sequence, hidden, role) and not self._live.holds(sequence):
                self._add_prompt(step, sequence)
        chunks = step.chunks
        if self.drafting is not None and chunks and all(chunk.decodes for chunk in chunks):
            chunks = self.drafting.add(chunks, self.max_tokens, self.max_outputs, self.pool)
        return Step(chunks, hidden, role) if chunks else None

    def _admit_in_turn(self, hidden: bool, role: bool | None) -> None:
        """Runs a waiting sequence of each client that has no prompt for this step, so that clients share the step.

        Running sequences give way if they must. They have no chunk of the step yet.
        """
        if role is False or not self.waiting or len(self.running) >= self.max_tokens:
            return
        reading = {s.place.client for s in self.running if s.length - s.computed > 1 and _fits(s, hidden, role)}
        while (sequence := self._admit_next(reading)) is not None:
            reading.add(sequence.place.client)

    def _admit_next(self, reading: Collection[str] | None = None) -> Sequence | None:
        """Runs the first waiting sequence that can run, in the order of turns. Returns None if there is none.

        Others pass a sequence that does not fit, until it has waited for PASSING_SECONDS.

        Args:
            reading: Only consider interactive sequences of other clients, and let running sequences give way to them.
        """
        full = len(self.running) >= self.max_sequences
        if full and reading is None:
            return None
        for sequence, is_first in self.waiting.in_turn():
            if full and not is_first:
                continue
            if reading is not None and (sequence.place.client in reading or sequence.place.batch):
                continue
            if self._admit(sequence):
                return sequence
            if sequence.state is State.LOADING:
                continue  # it has left the queue
            if reading is not None and is_first and self._displace(sequence):
                return sequence
            if sequence.refused_at >= 0 and self._clock() - sequence.refused_since > PASSING_SECONDS:
                return None
        return None

    def _displace(self, sequence: Sequence) -> bool:
        """Runs a sequence in the places of running ones that give way to it. Returns False if they do not suffice."""
        gone: list[Sequence] = []
        while (other := self.waiting.yielding(sequence, self.running, gone)) is not None:
            gone.append(other)
            if self._admit(sequence, gone):
                return True
            if sequence.state is State.LOADING or other.state is State.WAITING:
                return False  # they gave way, and it loads, or no slot is left for its state
        return False

    def _add_prompt(self, step: StepBuilder, sequence: Sequence) -> None:
        """Adds tokens of a prompt, as far as the step's budgets of tokens and of seconds allow, and at least one."""
        seconds = min(step.seconds, step.batch_seconds) if sequence.place.batch else step.seconds
        if seconds == math.inf or sequence.resumes:  # streams of a lost engine have waited, and go on together
            step.add(sequence)
            return
        budget, before, first = step.budget, step.tokens, sequence.computed
        least = all(chunk.decodes for chunk in step.chunks)
        most = max(self.speed.prompt_tokens(seconds, first), int(least))
        step.budget = min(budget, before + most)
        step.add(sequence)
        step.budget, tokens = budget, step.tokens - before
        spent = self.speed.prompt_seconds(first, tokens) if tokens < most else seconds
        step.seconds, step.batch_seconds = step.seconds - spent, step.batch_seconds - spent

    @property
    def _has_decoding(self) -> bool:
        """True if a running sequence decodes, in this step or in others."""
        return any(not s.wants_hidden and s.length - s.computed <= 1 for s in self.running)

    def _most_decoding(self) -> int:
        """Most sequences that a step decodes.

        With stages this is an equal part of the running sequences, or 0 while every part has a step under way.
        """
        count = len(self.running)
        if self.costs.stages == 1 or count == 0:
            return count
        groups = self.costs.groups(count)
        most = -(-count // groups)
        awaited = sum(s.in_flight > 0 and s.computed >= s.length for s in self.running)
        return most if -(-awaited // most) < groups else 0

    def _piece_budget(self, decoding: int) -> int:
        """Most tokens of a step with `decoding` decoding sequences and one piece of the prompts.

        The work of a piece does not shrink until no prompt is left.
        """
        prompts = [s for s in (*self.running, *self.waiting) if s.length - s.computed > 1]
        if not prompts:
            self._piece_work = 0.0
            return self.max_tokens
        work = sum(self.costs.work(s.computed, s.length) for s in prompts)
        self._piece_work = max(self._piece_work, work / self.costs.pieces(work))
        tokens = self.costs.piece_tokens(self._piece_work, work, prompts[0].computed, self.max_tokens)
        return min(self.max_tokens, max(tokens, decoding + PIECE_UNIT))

    def _next_is_hidden(self) -> bool:
        """True if the next step makes hidden states: all running sequences want them, or it is their turn."""
        if not self.running:
            first = next(self.waiting.in_turn(), None)
            self._last_hidden = first is not None and first[0].wants_hidden
        elif 0 < self._hidden_running < len(self.running):
            self._last_hidden = not self._last_hidden
        else:
            self._last_hidden = self._hidden_running > 0
        return self._last_hidden

    def commit(self, step: Step) -> None:
        """Marks a step as issued: for later steps its positions are in the cache.

        Its full blocks are known from then on.
        """
        self.waiting.charge((chunk.sequence for chunk in step.chunks), self.speed.seconds(step.chunks))
        for sequence, first, tokens, _, _, states, drafts in step.chunks:
            if step.hidden and sequence.pooling is None:
                sequence.encoded = True
                self._hidden_running -= 1
                continue
            sequence.computed = computed = first + tokens
            own = sequence.state_slots
            if own is not None:
                own.commit()
            if (sequence.shared_blocks + 1) * BLOCK_TOKENS <= computed and not self.whole_prompts:
                self.share_blocks(sequence)
            if own is not None and not drafts:
                own.leave(sequence, states, decoded=tokens == 1)

    def keep(self, chunk: "SequenceChunk", accepted: int) -> None:
        """Ends a collected chunk with drafts. The first `accepted` ones were drawn.

        The sequence goes on as if the others were never computed. Their positions are written again.
        """
        sequence, own = chunk.sequence, chunk.sequence.state_slots
        if sequence.state is not State.RUNNING:  # it has ended, or was preempted
            return
        all_right = accepted == len(chunk.drafts)
        sequence.computed = chunk.first + 1 + (accepted if all_right or own is None else 0)
        if own is not None:
            own.keep_drafts(all_right)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence in any state and frees its resources."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.waiting.stop(sequence)
            if sequence.drafter and not sequence.in_flight:  # the last drafts may have filled a block
                self.share_blocks(sequence)
            if self.drafting is not None:
                self.drafting.archive(sequence)
            self._hidden_running -= sequence.wants_hidden
            self._release(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.LOADING and self.tier is not None:
            self.tier.cancel(sequence)
        if self.drafting is not None:
            self.drafting.leave(sequence)
        sequence.state = State.FINISHED

    def _extend(self, sequence: Sequence) -> bool:
        """Allocates blocks for the last tokens, preempting the latest arrivals if needed.

        Returns False if it had to preempt `sequence` itself.
        """
        while sequence.num_blocks < sequence.blocks:
            if self.pool.available:
                self.append_blocks(sequence, 1)
            else:
                self.preemptions += 1
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Moves a running sequence back to its queue. It keeps its output and loses its blocks."""
        self.running.remove(victim)
        self.waiting.stop(victim)
        self._hidden_running -= victim.wants_hidden
        self._release(victim)
        victim.state, victim.resumes = State.WAITING, False
        self.waiting.add(victim)

    def _admit(self, sequence: Sequence, gone: Collection[Sequence] = ()) -> bool:
        """Runs a waiting sequence if there are blocks for all its tokens, and one spare block per running sequence.

        If a prefix of it is on disk, it leaves the queue until that is loaded.
        It also waits while a running prompt computes a long prefix of it, as with several choices of one request.

        Args:
            gone: Running sequences that are preempted if their places and blocks are enough.
        """
        if not sequence.is_ready:
            return False
        available, running = self.pool.available, len(self.running) - len(gone)
        if running >= self.max_sequences or (not gone and available <= sequence.refused_at):
            return False
        tenant = sequence.tenant if self.prefix_reuse else None
        states, limit, source = self.pool.states, sequence.reusable, NO_SLOT
        named = self._named(sequence, 0, limit)
        prefix = [] if tenant is None else self.pool.match(named, limit, tenant)
        known, known_prefix = len(prefix), prefix
        if states is not None:
            reused, source = states.latest(prefix)
            prefix = prefix[:reused]
        if self.prefix_reuse and any(self._waits_for(sequence, len(prefix), other) for other in self.running):
            return False
        blocks = sequence.blocks
        freed = self.pool.held_alone([other.block_table[: other.num_blocks].tolist() for other in gone], prefix)
        if blocks - len(prefix) + self.pool.idle_among(prefix) + running > available + freed:
            if sequence.refused_at < 0:
                sequence.refused_since = self._clock()
            sequence.refused_at = max(sequence.refused_at, available)
            return False
        if gone:
            for other in gone:
                self._preempt(other)
            self.displaced += len(gone)
            sequence.refused_at = -1  # fewer running sequences need spare blocks, even if no block became free
            return self._admit(sequence)
        sequence.cache_use.end = match_end(tenant is not None, known, len(prefix), limit)
        tier = None if tenant is None else self.tier
        if tier is not None and tier.begin_load(sequence, named, known_prefix, len(prefix)):
            self.waiting.remove(sequence)
            sequence.state, sequence.refused_at = State.LOADING, -1
            return False
        return self._run(sequence, prefix, known, source)

    def _run(self, sequence: Sequence, prefix: list[int], known: int, source: int) -> bool:
        """Runs a waiting sequence. Returns False if no slot is left for its state.

        Args:
            prefix: Blocks that it begins with.
            known: Number of blocks of its prefix that are known; more than `prefix` has if a state is missing.
            source: Slot of the state after `prefix`.
        """
        states = self.pool.states
        if states is not None:
            is_cached = self.prefix_reuse and sequence.tenant is not None
            own = SequenceState.claim(states, source, known * BLOCK_TOKENS, is_cached)
            if own is None:
                return False
            sequence.state_slots = own
        sequence.refused_at = -1
        self.pool.hold(prefix)
        sequence.block_table[: len(prefix)] = prefix
        sequence.num_blocks = sequence.shared_blocks = len(prefix)
        sequence.computed = len(prefix) * BLOCK_TOKENS
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.cache_use.matched = max(0, sequence.computed - sequence.cache_use.loaded)
            sequence.cached_from = max(sequence.computed, self.pool.last_length(prefix[-1])) if prefix else 0
        self.append_blocks(sequence, sequence.blocks - sequence.num_blocks)
        sequence.state = State.RUNNING
        self.waiting.start(sequence)
        self.running.append(sequence)
        self._hidden_running += sequence.wants_hidden
        return True

    def resume(self, sequences: list[Sequence]) -> None:
        """Puts sequences back into their queues that need not wait for a load any longer."""
        for sequence in sequences:
            sequence.state = State.WAITING
            self.waiting.add(sequence)

    def append_blocks(self, sequence: Sequence, count: int) -> None:
        """Gives a sequence `count` more blocks, which must be available."""
        begin = sequence.num_blocks
        sequence.num_blocks += count
        sequence.block_table[begin : begin + count] = self.pool.allocate(count)

    def share_blocks(self, sequence: Sequence) -> None:
        """Makes the full, final blocks of a sequence known to its tenant."""
        begin, end, table = sequence.shared_blocks, sequence.final // BLOCK_TOKENS, sequence.block_table
        if sequence.tenant is None or end <= begin:
            return
        tokens = self._named(sequence, begin * BLOCK_TOKENS, end * BLOCK_TOKENS).tobytes()
        parent = int(table[begin - 1]) if begin else ROOT
        table[begin:end] = self.pool.share(table[begin:end].tolist(), parent, tokens, sequence.tenant)
        sequence.shared_blocks = end

    def _named(self, sequence: Sequence, begin: int, end: int) -> np.ndarray:
        """The tokens [begin, end) as names of blocks have them."""
        return sequence.named(begin, end) if self.splits_roles else sequence.tokens[begin:end]

    def _release(self, sequence: Sequence) -> None:
        """Frees all blocks of a sequence and its state slot. Its snapshots stay."""
        if sequence.state_slots is not None:
            sequence.state_slots.release()
            sequence.state_slots = None
        self.pool.release(sequence.block_table[: sequence.num_blocks].tolist(), sequence.length)
        sequence.num_blocks = sequence.shared_blocks = sequence.computed = 0
        sequence.encoded = False

    def _waits_for(self, sequence: Sequence, prefix: int, other: Sequence) -> bool:
        """True if the running prompt `other` computes a much longer prefix of `sequence` than the `prefix` blocks known
        now.

        If layers keep states, this also requests a snapshot of `other` at the end of that prefix.
        """
        shared = shared_blocks(sequence, other)
        if shared < prefix + MIN_AWAITED_BLOCKS or other.state_slots is None:
            return shared >= prefix + MIN_AWAITED_BLOCKS
        if other.computed >= shared * BLOCK_TOKENS:
            return False
        if other.state_slots.wanted <= other.computed:
            other.state_slots.wanted = shared * BLOCK_TOKENS
        return True


def _fits(sequence: Sequence, hidden: bool, role: bool | None) -> bool:
    return sequence.wants_hidden is hidden and role in (None, sequence.reads_prompt)
