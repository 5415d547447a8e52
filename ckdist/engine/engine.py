"""The engine: takes requests and returns tokens, one step at a time.

It owns the sequences from `add` until they finish, and joins scheduler, executable and sampler. It knows no text and no
sockets, and reads the clock only for its counters. One thread uses it.
"""

import functools
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import wait
from typing import TYPE_CHECKING

import numpy as np

from ckdist.engine.batch_builder import BatchBuilder
from ckdist.engine.block_pool import BlockPool, state_pool
from ckdist.engine.grammars import Grammars, GrammarsBusy
from ckdist.engine.histogram import Histogram
from ckdist.engine.output import Output
from ckdist.engine.output_processor import OutputProcessor
from ckdist.engine.queue_place import ANY_PLACE, QueuePlace
from ckdist.engine.request import Tokens, check_positions, check_prompt, check_sampling
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.sampling_state import sampling_state
from ckdist.engine.scheduler import EngineBusy, Scheduler
from ckdist.engine.sequence import Sequence, State, delta_of
from ckdist.engine.sequence_state import turn_ends
from ckdist.engine.step_builder import Step
from ckdist.engine.tenant import ONE_TENANT, adapted_tenant
from ckdist.errors import RequestError, UnknownAdapterError
from ckdist.native import lib
from ckdist.program.executable import Executable
from ckdist.program.step_batch import BLOCK_TOKENS, NO_SLOT, Batch, own_slots

if TYPE_CHECKING:
    from ckdist.engine.constraint import Constraint
    from ckdist.engine.disk_cache import DiskCache
    from ckdist.engine.disk_tier import DiskTier
    from ckdist.engine.drafting import Drafting
    from ckdist.engine.dry_breakers import DryBreakers
    from ckdist.engine.named_adapters import Adapters
    from ckdist.engine.trace import Lane
    from ckdist.weights.stored_ranking import Ranking

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NO_SAMPLING = SamplingParams(max_tokens=0)


class Engine:
    """Continuous batching over one executable, with up to `executable.in_flight` steps under way.

    Args:
        eos_token_ids: Tokens that end a sequence unless `ignore_eos`.
        max_waiting: Length of the queue.
        max_outputs: Most rows of logits per step, if fewer than its tokens.
        more_stats: Returns numbers that `stats` adds to the engine's own.
        lane: Lane of a trace, or None.
        make_breakers: Makes the breakers of the vocabulary, for the first request with DRY. If None, DRY with sequence
            breakers is refused.
        grammars: Grammars of the vocabulary. If None, requests with a grammar are refused.
        start_tokens: First tokens of decoding if an encoder reads the prompt.
        banned_tokens: Tokens that are never drawn.
        max_step_seconds: Limit of a step with prompts while a sequence decodes.
        disk: The cache on disk, or None.
        adapters: The adapters that requests may name. None: there are none.
        make_drafting: Makes the drafts of all sequences, for the first request.
    """

    def __init__(
        self, executable: Executable, sampler: Sampler, eos_token_ids: Collection[int] = (), *,
        max_waiting: int = 512, max_outputs: int | None = None, prefix_reuse: bool = True,
        more_stats: Callable[[], Mapping[str, float | str]] = dict, lane: "Lane | None" = None,
        make_breakers: Callable[[], "DryBreakers"] | None = None, grammars: Grammars | None = None,
        start_tokens: Tokens = (), banned_tokens: Tokens = (),
        max_step_seconds: float = math.inf, disk: "DiskCache | None" = None, adapters: "Adapters | None" = None,
        make_drafting: Callable[[], "Drafting | None"] = lambda: None,
    ) -> None:  # fmt: skip
        self.executable, self.vocab_size = executable, executable.vocab_size
        self._more_stats, self.lane, self._make_breakers, self.grammars = more_stats, lane, make_breakers, grammars
        self._start, self._banned = np.array(start_tokens, np.int32), np.array(banned_tokens, np.int32)
        self.adapters = adapters
        self.ranking: Ranking | None = None  # of a decoder that ranks documents
        self._compiling: list[Sequence] = []  # with a grammar that is not compiled yet
        cache = executable.num_blocks * BLOCK_TOKENS
        self.max_positions = min(executable.context_length, cache)
        self._room = (
            f"the context of {self.max_positions}"
            if executable.context_length <= cache
            else f"the KV cache of {cache} positions"
        )
        self.states = state_pool(executable.state_slots)
        self.pool = BlockPool(executable.num_blocks, self.states)
        self.scheduler = Scheduler(
            self.pool, executable.max_tokens, executable.max_sequences,
            min(max_outputs or executable.max_outputs, executable.max_outputs), max_waiting, prefix_reuse,
            executable.costs, whole_prompts=not executable.has_logits or len(start_tokens) > 0,
            splits_roles=executable.splits_roles, max_step_seconds=max_step_seconds,
        )  # fmt: skip
        self.tier: DiskTier | None = None
        if disk is not None and self.scheduler.prefix_reuse:
            from ckdist.engine import disk_tier

            self.tier = self.scheduler.tier = disk_tier.DiskTier(disk, executable, self.pool, self.scheduler.speed)
        self._make_drafting = make_drafting
        self.drafting: Drafting | None = None
        self._builder = BatchBuilder(self.scheduler, self.max_positions)
        self._sequences: dict[Hashable, Sequence] = {}
        self._in_flight: deque[tuple[Step, int]] = deque()  # (issued step, ns), the oldest first
        self._sampled = 0  # ns when the last step was sampled
        self._collected: list[Output] = []  # outside of `step`, which returns them
        self._requests = self._prompt_tokens = 0
        self._step_seconds = Histogram(STEP_SECONDS)
        self.outputs = OutputProcessor(sampler, eos_token_ids, grammars, self._finish)

    @functools.cached_property
    def _breakers(self) -> "DryBreakers | None":
        return self._make_breakers and self._make_breakers()

    @property
    def has_work(self) -> bool:
        """True if a sequence waits or runs, or outputs are still to be returned."""
        return bool(self._sequences or self._in_flight or self._collected)

    @property
    def has_queue_room(self) -> bool:
        """True if the queue has room for another request."""
        return self.scheduler.queued < self.scheduler.max_waiting

    @property
    def ids(self) -> list[Hashable]:
        """Ids of the unfinished sequences."""
        return list(self._sequences)

    def add(
        self,
        id: Hashable,
        prompt: Tokens,
        params: SamplingParams,
        tenant: bytes | None = ONE_TENANT,
        place: QueuePlace = ANY_PLACE,
        positions: np.ndarray | None = None,
        drawn: Tokens = (),
        adapters: Collection[tuple[str, float]] = (),
    ) -> None:
        """Queues a request.

        Args:
            tenant: Cached blocks are reused and left only within a tenant. None: neither.
            place: Its queue, and its order there.
            positions: Positions of the prompt's tokens in time, height and width, (tokens, 3). Generated tokens have
                the positions after the largest one. Blocks are named by tokens alone, so none are reused or left.
            drawn: Tokens of the answer that another engine drew with these parameters. This one goes on after them.
            adapters: Names and scales of the adapters whose sum it runs with.

        Raises:
            RequestError: A field is wrong, or the prompt cannot fit.
            UnknownAdapterError: There is no such adapter.
            EngineBusy: The queue is full, or too many breakers or grammars are being prepared.
        """
        self._check_generates(params)
        ids = self._check_prompt(id, prompt, params.max_tokens > 0 and not len(self._start))
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**64
        self.scheduler.check_room()
        breakers = self._breakers if "dry" in params.active_samplers else None
        if breakers is not None and not breakers.has_room(params.dry_sequence_breakers):
            raise EngineBusy("too many sets of dry_sequence_breakers are being prepared; try again later")
        if params.grammar is not None and self.grammars is not None and not self.grammars.has_room(params.grammar):
            raise EngineBusy("too many grammars are being compiled; try again later")
        state = sampling_state(
            params, self.outputs.eos_token_ids, self.vocab_size, breakers, self.grammars, self._banned
        )
        begin, source = (self._start, ids) if len(self._start) else (ids, None)
        capacity = min(len(begin) + params.max_tokens, self.max_positions)
        more = {"source": source, "tenant": tenant, "place": place}
        if positions is not None:
            positions = self._check_positions(positions, len(ids), params.max_tokens > 0)
            capacity = min(capacity, self.executable.context_length - delta_of(positions))
            more |= {"positions": positions, "tenant": None}
        if adapters:
            more["adapters"] = used = self.named_adapters().use(adapters)
            more["tenant"] = adapted_tenant(more["tenant"], b"".join(use.digest for use in used))
        ends = (0, 0) if self.states is None else turn_ends(ids, self.outputs.eos_token_ids)
        sequence = Sequence(id, begin, params, seed, capacity, time.monotonic(), state, turn_ends=ends, **more)
        try:
            if len(drawn):
                self._append_drawn(sequence, drawn)
            self._queue(sequence)
        except BaseException:
            self._leave_adapters(sequence)
            raise
        if state is not None and state.constraint is not None:
            self._compiling.append(sequence)

    def _check_generates(self, params: SamplingParams) -> None:
        if not self.executable.has_logits:
            raise RequestError("the model is an encoder, which makes no text; ask it for embeddings", "model")
        check_sampling(params, self.vocab_size)
        if len(self._start) and params.prompt_logprobs is not None:
            raise RequestError("an encoder reads the prompt, which has no log probabilities", "prompt_logprobs")

    def _append_drawn(self, sequence: Sequence, drawn: Tokens) -> None:
        """Appends tokens of the answer and updates the sampling state. Raises RequestError if they are not possible."""
        if sequence.params.mirostat:
            raise RequestError("the state of mirostat does not follow from the tokens; draw them again", "drawn")
        if sequence.length + len(drawn) >= len(sequence.tokens):
            room = len(sequence.tokens) - sequence.length
            raise RequestError(f"{len(drawn)} tokens were drawn, and the answer has at most {room}", "drawn")
        for token in check_prompt(drawn, self.vocab_size).tolist():
            sequence.append(token)
        if (state := sequence.sampling_state) is not None:
            if state.constraint is not None:
                state.constraint.earlier = drawn
            self.outputs.keep_state(sequence, state, None)

    def embed(
        self,
        id: Hashable,
        prompt: Tokens,
        pooling: str,
        first_text: int = 0,
        tenant: bytes | None = ONE_TENANT,
        place: QueuePlace = ANY_PLACE,
    ) -> None:
        """Queues a prompt whose hidden states after the last norm, or whose score, are its Output's `embedding`.

        Args:
            pooling: One of POOLINGS.
            first_text: Tokens of the first text if the prompt has two.
            tenant, place: As in `add`.

        Raises:
            RequestError: `pooling` is wrong, or the prompt cannot fit.
            EngineBusy: The queue is full.
        """
        from ckdist.engine.pooling import new_pooling  # few servers embed

        pools = new_pooling(pooling, self.ranking)
        if not self.executable.has_hidden:
            raise RequestError(
                "a model in several stages gives no embeddings; give --pipeline-parallel-size 1", "model"
            )
        ids = self._check_prompt(id, prompt, False)
        if not 0 <= first_text <= len(ids):
            raise RequestError(f"the first text has {first_text} of {len(ids)} tokens", "first_text")
        fields = {"first_text": first_text, "tenant": tenant, "place": place}
        self._queue(Sequence(id, ids, NO_SAMPLING, 0, len(ids), time.monotonic(), pooling=pools, **fields))

    def _check_prompt(self, id: Hashable, prompt: Tokens, continues: bool) -> np.ndarray:
        """The prompt as int32 (tokens,). Raises RequestError if it is wrong or leaves no room for the output."""
        if id in self._sequences:
            raise RequestError("a request with this id is running; choose another id", "id")
        most = self.max_positions - continues
        if len(prompt) > most:
            raise RequestError(
                f"prompt of {len(prompt)} tokens does not fit {self._room}, "
                f"which holds {most} and the output; shorten the prompt or raise --ctx-size",
                "prompt",
            )
        return check_prompt(prompt, self.vocab_size)

    def _check_positions(self, positions: np.ndarray, tokens: int, continues: bool) -> np.ndarray:
        """The positions as int32 (tokens, 3). Raises RequestError if they are wrong or the model does not read them."""
        if not self.executable.has_axes:
            raise RequestError("positions of three axes are given, the model's have one; leave them out", "positions")
        return check_positions(positions, tokens, self.executable.context_length - continues)

    def named_adapters(self) -> "Adapters":
        """Returns the adapters that requests may name. Raises UnknownAdapterError if there are none."""
        if self.adapters is None:
            raise UnknownAdapterError("there are no adapters: start with --lora NAME=FOLDER or --max-loras N", "model")
        return self.adapters

    def _leave_adapters(self, sequence: Sequence) -> None:
        if self.adapters is not None:
            self.adapters.leave(sequence.adapters)

    def load_adapter(self, name: str, folder: str, replaces: bool = False) -> None:
        """Begins to load an adapter, which `adapters.take_load` ends. Raises RequestError if that is not possible."""
        self.collect_all()
        self.named_adapters().begin_load(self.executable.worker, self.executable.model, name, folder, replaces)

    def _queue(self, sequence: Sequence) -> None:
        if self.drafting is None and sequence.pooling is None:
            self.drafting = self.scheduler.drafting = self._make_drafting()
        if self.drafting is not None:
            self.drafting.check(sequence)
        self.scheduler.add(sequence)
        self._sequences[sequence.id] = sequence
        self._requests += 1
        self._prompt_tokens += sequence.prompt_tokens

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        self._leave_adapters(sequence)
        state = sequence.sampling_state
        if state is not None and state.constraint is not None and self.grammars is not None:
            self.grammars.leave(state.constraint)

    def step(self) -> list[Output]:
        """Issues batches until the executable has its limit under way. Then returns the outputs of the oldest one.

        Raises EngineError if a rank is lost. The sequences are then lost as well.
        """
        self.tend()
        outputs, self._collected = self._collected, []
        outputs += self._refuse_grammars() if self._compiling else []
        begin = time.monotonic_ns()
        while len(self._in_flight) < self.executable.in_flight and self._issue():
            pass
        if not self._in_flight:
            self._wait_for_state()
            return outputs
        outputs += self._collect()
        self._step_seconds.observe((time.monotonic_ns() - begin) * 1e-9)
        return outputs

    @property
    def is_storing(self) -> bool:
        """True if blocks are on their way to disk, for which `tend` must be called."""
        return self.tier is not None and self.tier.is_busy

    def tend(self) -> None:
        """Continues copies to and from the disk."""
        if self.tier is not None and self.tier.is_due():
            self.collect_all()
            self.scheduler.resume(self.tier.tend())

    def finish_storing(self, seconds: float = 60.0) -> None:
        """Waits until all shared blocks are on disk, at most for `seconds`. No sequence may wait or run."""
        if self.tier is not None and not self.executable.failed:
            self.tier.finish(seconds)

    def _issue(self) -> bool:
        """Issues the next batch. Returns False if there is none."""
        begin = time.monotonic_ns()
        step = self.scheduler.schedule()
        if step is None:
            return False
        batch = self._builder.build(step)
        scheduled = time.monotonic_ns()
        if self.lane is not None:
            self.lane.add(lib.ckdist_trace_schedule, begin, scheduled, len(batch.token_ids), len(batch.chunks))
        self.executable.publish(batch)
        self.scheduler.commit(step)
        for chunk in step.chunks:
            chunk.sequence.in_flight += 1
        self._in_flight.append((step, scheduled))
        return True

    def _collect(self) -> list[Output]:
        """Waits for the oldest batch and returns its outputs."""
        step, issued = self._in_flight.popleft()
        drawn = (c.sequence for c in step.chunks if c.samples and c.sequence.state is not State.FINISHED)
        masks = None if step.hidden else self.outputs.begin_masks(drawn)  # of the next tokens, during the step
        logits = self.executable.collect()  # (outputs, vocab)
        ran = time.monotonic_ns()
        if masks is not None:
            masks()
        for chunk in step.chunks:
            chunk.sequence.in_flight -= 1
        make = self.outputs.pool if step.hidden else self.outputs.process
        outputs = make(step.chunks, logits)
        begin, self._sampled = max(issued, self._sampled), time.monotonic_ns()
        self.scheduler.speed.observe(step.chunks, (ran - begin) * 1e-9)
        if self.drafting is not None:
            self.drafting.end(step.chunks, self.scheduler.keep, (ran - begin) * 1e-9)
        if self.lane is not None:
            tokens = sum(chunk.tokens for chunk in step.chunks)
            self.lane.add(lib.ckdist_trace_run, begin, ran, tokens, len(step.chunks))
            self.lane.add(lib.ckdist_trace_sample, ran, self._sampled, len(outputs))
        return outputs

    def collect_all(self) -> None:
        """Waits for all batches under way. The next `step` returns their outputs. Raises EngineError like it."""
        while self._in_flight:
            self._collected += self._collect()

    def _wait_for_state(self) -> None:
        """Waits at most 10 ms for the sampling state of a waiting sequence, or 1 ms for the disk."""
        if self.is_storing:
            time.sleep(0.001)
        for sequence in self.scheduler.waiting:
            state = sequence.sampling_state
            if state is not None and state.awaited:
                wait(state.awaited, timeout=0.01)
                return

    def _refuse_grammars(self) -> list[Output]:
        """Ends the sequences whose grammars did not compile."""
        outputs, waiting = [], []
        for sequence in self._compiling:
            compiled = _constraint(sequence).compiled.future
            if sequence.state is State.FINISHED:
                continue
            if not compiled.done():
                waiting.append(sequence)
            elif (error := compiled.exception()) is not None:
                status = 429 if isinstance(error, GrammarsBusy) else 400
                outputs.append(self.outputs.failed(sequence, str(error), status))
        self._compiling = waiting
        return outputs

    def abort(self, id: Hashable) -> Output | None:
        """Ends a sequence and frees its blocks at once. Returns None if no sequence has this id."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return None
        output = self.outputs.output(sequence, [], None, "abort")
        if not self._sequences:
            self.collect_all()  # `step` may never be called again, and no rank may wait for it
        return output

    def stats(self) -> dict[str, float | str]:
        """Counters since the start (`*_total`), gauges, and the buckets of `step_seconds` and `first_token_seconds`.

        `Histogram.numbers` defines the buckets.
        """
        return {
            "requests_total": self._requests,
            "prompt_tokens_total": self._prompt_tokens,
            "generated_tokens_total": self.outputs.generated_tokens,
            "cached_tokens_total": self.outputs.cached_tokens,
            "preemptions_total": self.scheduler.preemptions,
            "displaced_total": self.scheduler.displaced,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": self.scheduler.queued,
            "blocks": self.pool.num_blocks,
            "blocks_used": self.pool.num_blocks - self.pool.available,
            "blocks_cached": self.pool.cached,
            **self._state_stats(),
            **(self.tier.stats() if self.tier is not None else {}),
            **self._step_seconds.numbers("step_seconds"),
            **self.outputs.first_token_seconds.numbers("first_token_seconds"),
            **(self.drafting.stats() if self.drafting is not None else {}),
            **self._more_stats(),
        }

    def _state_stats(self) -> dict[str, int]:
        if self.states is None:
            return {}
        return {
            "state_slots": self.states.num_slots,
            "state_slots_used": self.states.num_slots - self.states.available,
            "state_snapshots": self.states.snapshots,
            "state_snapshots_saved_total": self.states.saved,
        }

    def logits(self, token_ids: Tokens) -> Iterator[np.ndarray]:
        """Yields the logits of every position in chunks: float32 (tokens, vocab), each valid until the next.

        Other sequences keep running, since it uses blocks of its own. Raises RequestError if too few are free.
        """
        if len(self._start):
            raise RequestError("the model has an encoder; its logits depend on the encoder's input", "model")
        ids = check_prompt(token_ids, self.vocab_size)
        if len(ids) > self.max_positions:
            raise RequestError(f"{len(ids)} tokens do not fit {self._room}; shorten them or raise --ctx-size", "prompt")
        needed = -(-len(ids) // BLOCK_TOKENS)
        if needed > self.pool.available:
            raise RequestError(
                f"{len(ids)} tokens need {needed} blocks of the KV cache and {self.pool.available} are free; "
                "wait or raise --ctx-size",
                "prompt",
            )
        if self.states is not None and not self.states.available:
            raise RequestError(
                f"all {self.states.num_slots} slots of states are used; wait or raise --parallel", "prompt"
            )
        slot = NO_SLOT if self.states is None else self.states.allocate()
        table = self.pool.allocate(needed)
        try:
            chunk = min(self.scheduler.max_tokens, self.scheduler.max_outputs)
            for first in range(0, len(ids), chunk):
                tokens = ids[first : first + chunk]
                blocks = -(-(first + len(tokens)) // BLOCK_TOKENS)
                runs = np.array([[len(tokens), first, blocks]], np.int32)
                all_rows = np.arange(len(tokens), dtype=np.int32)
                states = own_slots(self.executable.state_slots, range(slot, slot + 1), first)
                self.collect_all()
                batch = Batch(tokens, runs, np.array(table[:blocks], np.int32), all_rows, states, prompts=True)
                yield self.executable.run(batch)
        finally:
            if self.states is not None:
                self.states.release(slot)
            self.pool.release(table)


def _constraint(sequence: Sequence) -> "Constraint":
    state = sequence.sampling_state
    assert state is not None and state.constraint is not None, "it came with a grammar"
    return state.constraint
