"""The engine: requests in, tokens out, one step at a time.

It owns the sequences from `add` to their finish, and brings scheduler, executable and sampler together. It knows
nothing of text, sockets or clocks other than for its counters; it is used by one thread.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.constraint import Constraint
from ckdist.engine.dry_breakers import DryBreakers
from ckdist.engine.grammars import Grammars, Masks
from ckdist.engine.histogram import Histogram
from ckdist.engine.pooling import POOLINGS, Pooling
from ckdist.engine.protocol import StepExecutable, TokenSampler
from ckdist.engine.request import Tokens, check_prompt, check_sampling
from ckdist.engine.sampler import Sample, SampleRow
from ckdist.engine.sampling import SamplingParams
from ckdist.engine.sampling_state import SamplingState, sampling_state
from ckdist.engine.scheduler import EngineBusy, Scheduler, SequenceChunk, Step
from ckdist.engine.sequence import Sequence, State
from ckdist.engine.state_pool import SequenceState, StatePool
from ckdist.engine.trace import Lane
from ckdist.errors import CkdistError, RequestError
from ckdist.native import lib
from ckdist.program.batch import BLOCK_TOKENS, Batch

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NO_SAMPLING = SamplingParams(max_tokens=0)
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


@dataclass(frozen=True)
class Output:
    """What a step brought for one sequence.

    `tokens` are new and never hold the token that ended the sequence (EOS or a stop id). A logprobs entry is
    [chosen_logprob, [[token, logprob], ...]]; `prompt_logprobs` comes once, with the first output, and starts with
    None.
    """

    id: Hashable
    tokens: list[int]
    logprobs: list[Any] | None
    finish_reason: str | None  # None, "stop", "length", "abort", "error"
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[Any] | None = None
    error: str | None = None  # what went wrong with this sequence alone
    error_status: int = 500  # of HTTP; 400 where the request is at fault
    stop_token: int | None = None  # of `stop_token_ids`, which ended the sequence; None for EOS
    embedding: np.ndarray | None = None  # float32 (hidden,), of a prompt that was to be embedded


class Engine:
    """Continuous batching over one executable, with as many steps under way as that has stages."""

    def __init__(
        self, executable: StepExecutable, sampler: TokenSampler, eos_token_ids: Collection[int] = (), *,
        max_waiting: int = 512, max_outputs: int | None = None, prefix_reuse: bool = True,
        more_stats: Callable[[], Mapping[str, float | str]] = dict, lane: Lane | None = None,
        dry_breakers: DryBreakers | None = None, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        """eos_token_ids: end a sequence unless `ignore_eos`. max_waiting: length of the queue.

        max_outputs: rows of logits of one step, where fewer than its tokens. more_stats: numbers that `stats` gives
        besides the engine's own. lane: of a trace, where there is one. dry_breakers: of the vocabulary; without,
        requests for DRY with sequence breakers are refused. grammars: of the vocabulary, likewise.
        """
        self.executable, self.sampler, self.eos_token_ids = executable, sampler, frozenset(eos_token_ids)
        self.vocab_size, self._more_stats, self.lane = executable.vocab_size, more_stats, lane
        self._dry_breakers, self.grammars = dry_breakers, grammars
        self._compiling: list[Sequence] = []  # those that came with a grammar that was not compiled yet
        cache = executable.num_blocks * BLOCK_TOKENS
        self.max_positions = min(executable.context_length, cache)
        self._room = (
            f"the context of {self.max_positions}"
            if executable.context_length <= cache
            else f"the KV cache of {cache} positions"
        )
        self.states = StatePool(executable.state_slots) if executable.state_slots else None
        self.pool = BlockPool(executable.num_blocks, self.states)
        self.scheduler = Scheduler(
            self.pool, executable.max_tokens, executable.max_sequences, self.max_positions,
            min(max_outputs or executable.max_tokens, executable.max_tokens), max_waiting, prefix_reuse,
            executable.in_flight, whole_prompts=not executable.has_logits,
        )  # fmt: skip
        self._sequences: dict[Hashable, Sequence] = {}
        self._in_flight: deque[tuple[Step, int]] = deque()  # issued, when, and not collected; the oldest first
        self._sampled = 0  # when the last one was done with, in ns
        self._collected: list[Output] = []  # outside of `step`, which gives them
        self._requests = self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._step_seconds, self._first_token_seconds = Histogram(STEP_SECONDS), Histogram(FIRST_TOKEN_SECONDS)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs, or what a step brought is not given yet."""
        return bool(self._sequences or self._in_flight or self._collected)

    @property
    def has_queue_room(self) -> bool:
        """Whether `add` would not be refused for the length of the queue."""
        return len(self.scheduler.waiting) < self.scheduler.max_waiting

    @property
    def ids(self) -> list[Hashable]:
        """Of the sequences that are not finished."""
        return list(self._sequences)

    def add(self, id: Hashable, prompt: Tokens, params: SamplingParams) -> None:
        """Queues a request.

        Raises RequestError for wrong fields or a prompt that cannot fit, EngineBusy when the queue is full.
        """
        if not self.executable.has_logits:
            raise RequestError("the model is an encoder, which makes no text; ask it for embeddings", "model")
        check_sampling(params, self.vocab_size)
        ids = self._check_prompt(id, prompt, params.max_tokens > 0)
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**64
        self.scheduler.check_room()
        breakers = self._dry_breakers if "dry" in params.active_samplers else None
        if breakers is not None and not breakers.has_room(params.dry_sequence_breakers):
            raise EngineBusy("too many sets of dry_sequence_breakers are being prepared; try again later")
        if params.grammar is not None and self.grammars is not None and not self.grammars.has_room(params.grammar):
            raise EngineBusy("too many grammars are being compiled; try again later")
        state = sampling_state(params, self.eos_token_ids, self.vocab_size, self._dry_breakers, self.grammars)
        capacity = min(len(ids) + params.max_tokens, self.max_positions)
        sequence = Sequence(id, ids, params, seed, capacity, time.monotonic(), state)
        self._queue(sequence)
        if state is not None and state.constraint is not None:
            self._compiling.append(sequence)

    def embed(self, id: Hashable, prompt: Tokens, pooling: str, first_text: int = 0) -> None:
        """Queues a prompt whose hidden states behind the last norm become one vector, the `embedding` of its Output; of
        a cross-encoder that is its score. first_text: of a prompt of two texts the tokens of the first.

        Raises RequestError for a wrong `pooling` or a prompt that cannot fit, EngineBusy when the queue is full.
        """
        if pooling not in POOLINGS:
            raise RequestError(f"pooling {pooling[:40]!r} is not known: use one of {', '.join(POOLINGS)}", "pooling")
        if not self.executable.has_hidden:
            raise RequestError(
                "a model in several stages gives no embeddings; leave --pipeline-parallel-size out", "model"
            )
        ids = self._check_prompt(id, prompt, False)
        if not 0 <= first_text <= len(ids):
            raise RequestError(f"the first text has {first_text} of {len(ids)} tokens", "first_text")
        pools = {"pooling": Pooling(pooling), "first_text": first_text}
        self._queue(Sequence(id, ids, NO_SAMPLING, 0, len(ids), time.monotonic(), **pools))

    def _check_prompt(self, id: Hashable, prompt: Tokens, continues: bool) -> np.ndarray:
        """The prompt as int32 (tokens,). RequestError for what is wrong, or leaves no room for what follows."""
        if id in self._sequences:
            raise RequestError("a request with this id is running; choose another id", "id")
        most = self.max_positions - continues
        if len(prompt) > most:
            raise RequestError(
                f"prompt of {len(prompt)} tokens does not fit {self._room}, "
                f"which takes {most} and the output; shorten the prompt or raise --ctx-size",
                "prompt",
            )
        return check_prompt(prompt, self.vocab_size)

    def _queue(self, sequence: Sequence) -> None:
        """Gives a sequence to the scheduler. Raises EngineBusy when the queue is full."""
        self.scheduler.add(sequence)
        self._sequences[sequence.id] = sequence
        self._requests += 1
        self._prompt_tokens += len(sequence.prompt)

    def step(self) -> list[Output]:
        """Issues as many batches as may be under way, and gives what the oldest one brings.

        Raises EngineError when a rank is lost; the sequences are then lost as well.
        """
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

    def _issue(self) -> bool:
        """Issues the next batch; False where there is none."""
        begin = time.monotonic_ns()
        step = self.scheduler.schedule()
        if step is None:
            return False
        scheduled = time.monotonic_ns()
        if self.lane is not None:
            size = len(step.batch.token_ids), len(step.batch.chunks)
            self.lane.add(lib.ckdist_trace_schedule, begin, scheduled, *size)
        self.executable.publish(step.batch)
        self.scheduler.commit(step)
        for chunk in step.chunks:
            chunk.sequence.in_flight += 1
        self._in_flight.append((step, scheduled))
        return True

    def _collect(self) -> list[Output]:
        """What the oldest batch brings."""
        step, issued = self._in_flight.popleft()
        masks = self._begin_masks(step.chunks)
        logits = self.executable.collect()  # (outputs, vocab)
        ran = time.monotonic_ns()
        if masks is not None and self.grammars is not None:
            self.grammars.finish_masks(masks)
        for chunk in step.chunks:
            chunk.sequence.in_flight -= 1
        make = self._pooled if step.batch.hidden else self._outputs
        outputs = make(step.chunks, logits)
        begin, self._sampled = max(issued, self._sampled), time.monotonic_ns()
        if self.lane is not None:
            tokens = sum(chunk.tokens for chunk in step.chunks)
            self.lane.add(lib.ckdist_trace_run, begin, ran, tokens, len(step.chunks))
            self.lane.add(lib.ckdist_trace_sample, ran, self._sampled, len(outputs))
        return outputs

    def collect_all(self) -> None:
        """Leaves nothing under way; what it brings the next `step` gives. Raises EngineError as that."""
        while self._in_flight:
            self._collected += self._collect()

    def _wait_for_state(self) -> None:
        """Waits a moment for the head of the queue, where it is that which nothing can be done without."""
        waiting = self.scheduler.waiting
        state = waiting[0].sampling_state if waiting else None
        if state is not None and state.awaited:
            wait(state.awaited, timeout=0.01)

    def _refuse_grammars(self) -> list[Output]:
        """Ends the sequences whose grammars turn out to be wrong."""
        outputs, waiting = [], []
        for sequence in self._compiling:
            compiled = _constraint(sequence).compiled
            if sequence.state is State.FINISHED:
                continue
            if not compiled.done():
                waiting.append(sequence)
            elif (error := compiled.exception()) is not None:
                outputs.append(self._failed(sequence, str(error), 400))
        self._compiling = waiting
        return outputs

    def _begin_masks(self, chunks: list[SequenceChunk]) -> Masks | None:
        """Begins to find the next tokens that grammars allow, beside the step; None where there is no grammar."""
        sampled = (chunk.sequence for chunk in chunks if chunk.samples and chunk.sequence.state is not State.FINISHED)
        states = [sequence.sampling_state for sequence in sampled]
        followed = [(s.constraint, s.banned) for s in states if s is not None and s.constraint is not None]
        return self.grammars.begin_masks(followed) if followed and self.grammars is not None else None

    def abort(self, id: Hashable) -> Output | None:
        """Ends a sequence and frees its blocks at once. None when there is none of that id."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return None
        output = self._output(sequence, [], None, "abort")
        if not self._sequences:
            self.collect_all()  # nobody may ask for another step, and no rank is to wait for one
        return output

    def stats(self) -> dict[str, float | str]:
        """Counters since the start (`*_total`), gauges, and the buckets of `step_seconds` and `first_token_seconds`
        (see Histogram).
        """
        return {
            "requests_total": self._requests,
            "prompt_tokens_total": self._prompt_tokens,
            "generated_tokens_total": self._generated_tokens,
            "cached_tokens_total": self._cached_tokens,
            "preemptions_total": self.scheduler.preemptions,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "blocks": self.pool.num_blocks,
            "blocks_used": self.pool.num_blocks - self.pool.available,
            "blocks_cached": self.pool.cached,
            **self._state_stats(),
            **self._step_seconds.numbers("step_seconds"),
            **self._first_token_seconds.numbers("first_token_seconds"),
            **self._more_stats(),
        }

    def _state_stats(self) -> dict[str, int]:
        """Of a model whose layers keep states."""
        if self.states is None:
            return {}
        return {
            "state_slots": self.states.num_slots,
            "state_slots_used": self.states.num_slots - self.states.available,
            "state_snapshots": self.states.snapshots,
            "state_snapshots_saved_total": self.states.saved,
        }

    def logits(self, token_ids: Tokens) -> Iterator[np.ndarray]:
        """The logits of every position, in chunks: float32 (tokens, vocab), each valid until the next.

        Runs beside whatever else runs, in blocks of its own; raises RequestError when there are not enough of them.
        """
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
        own = SequenceState(self.states.allocate()) if self.states is not None else None
        table = [self.pool.allocate() for _ in range(needed)]
        try:
            chunk = min(self.scheduler.max_tokens, self.scheduler.max_outputs)
            for first in range(0, len(ids), chunk):
                tokens = ids[first : first + chunk]
                blocks = -(-(first + len(tokens)) // BLOCK_TOKENS)
                runs = np.array([[len(tokens), first, blocks]], np.int32)
                every = np.arange(len(tokens), dtype=np.int32)
                states = None if own is None else np.array([own.row(first)], np.int32)
                self.collect_all()
                yield self.executable.run(Batch(tokens, runs, np.array(table[:blocks], np.int32), every, states))
        finally:
            if self.states is not None and own is not None:
                self.states.release(own.slot)
            self.pool.release(table)

    def _outputs(self, chunks: list[SequenceChunk], logits: np.ndarray) -> list[Output]:
        """What a step's logits, float32 (outputs, vocab), bring for its sequences."""
        outputs: list[Output] = []
        sequences: list[Sequence] = []
        rows: list[SampleRow] = []
        places: list[int] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is State.FINISHED:  # since the step was issued
                continue
            if sequence.scoring and (error := self._score_prompt(chunk, logits)) is not None:
                outputs.append(self._output(sequence, [], None, "error", error))
            elif chunk.samples and sequence.params.max_tokens == 0:
                outputs.append(self._output(sequence, [], None, "length"))
            elif chunk.samples and (output := self._without_sampling(sequence)) is not None:
                outputs.append(output)
            elif chunk.samples:
                sequences.append(sequence)
                places.append(chunk.row + chunk.rows - 1)
                rows.append(_row(sequence))
        if rows:
            chosen = logits if len(places) == len(logits) else logits[places]  # (rows, vocab)
            samples = self._sample(chosen, rows)
            self._advance_grammars(sequences, samples)
            for sequence, sample in zip(sequences, samples, strict=True):
                outputs.append(self._extend(sequence, sample))
        return outputs

    def _pooled(self, chunks: list[SequenceChunk], rows: np.ndarray) -> list[Output]:
        """What a step's hidden states, float32 (outputs, hidden), bring for its sequences."""
        outputs: list[Output] = []
        for chunk in chunks:
            sequence = chunk.sequence
            pooling = sequence.pooling
            assert pooling is not None  # of a step that makes hidden states
            if chunk.rows:
                pooling.take(rows[chunk.row : chunk.row + chunk.rows])
                sequence.scored = min(chunk.first + chunk.tokens, len(sequence.prompt) - 1)
            if chunk.samples:
                vector = pooling.vector()
                if np.isfinite(vector).all():
                    outputs.append(replace(self._output(sequence, [], None, "stop"), embedding=vector))
                else:
                    outputs.append(self._failed(sequence, "the model's hidden states are not finite numbers", 500))
        return outputs

    def _advance_grammars(self, sequences: list[Sequence], samples: Iterable[Sample | CkdistError]) -> None:
        """Tells the sequences' grammars which tokens were drawn."""
        moves = [
            (sequence.sampling_state.constraint, sample.token)
            for sequence, sample in zip(sequences, samples, strict=True)
            if sequence.sampling_state is not None
            and sequence.sampling_state.constraint is not None
            and isinstance(sample, Sample)
            and not self._is_end(sequence, sample.token)
        ]
        if moves and self.grammars is not None:
            self.grammars.advance(moves)

    def _is_end(self, sequence: Sequence, token: int) -> bool:
        """Whether a token is an EOS that ends the sequence."""
        return token in self.eos_token_ids and (not sequence.params.ignore_eos or sequence.params.grammar is not None)

    def _sample(self, logits: np.ndarray, rows: list[SampleRow]) -> list[Sample] | list[Sample | CkdistError]:
        """One sample per row, or the error of a row whose logits allow none, which must not take the others with it."""
        try:
            return self.sampler.sample(logits, rows)
        except CkdistError as error:
            return (
                [error]
                if len(rows) == 1
                else [self._sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
            )

    def _extend(self, sequence: Sequence, sample: Sample | CkdistError) -> Output:
        """Adds a sampled token to its sequence, or ends the sequence by it."""
        if isinstance(sample, CkdistError):
            return self._output(sequence, [], None, "error", str(sample))
        logprobs = None if sequence.params.logprobs is None else [_entry(sample)]
        return self._take_tokens(sequence, [sample.token], logprobs, sample)

    def _without_sampling(self, sequence: Sequence) -> Output | None:
        """What a grammar decides alone: its error, or tokens that must come; None where a token is to be sampled."""
        state = sequence.sampling_state
        constraint = None if state is None else state.constraint
        if constraint is None:
            return None
        if constraint.error is not None:
            return self._failed(sequence, constraint.error, 400)
        if constraint.forced and sequence.params.logprobs is None:
            return self._take_tokens(sequence, [], None)
        return None

    def _take_tokens(
        self, sequence: Sequence, tokens: list[int], logprobs: list[Any] | None, sample: Sample | None = None
    ) -> Output:
        """Adds tokens to a sequence, and those that its grammar forces after them, or ends it by one."""
        params, state = sequence.params, sequence.sampling_state
        constraint = None if state is None else state.constraint
        if constraint is not None and params.logprobs is None:
            tokens = [*tokens, *constraint.take_forced()]
        taken, finish, stop = list[int](), None, None
        for token in tokens:
            ends = self._is_end(sequence, token)
            if ends or token in params.stop_token_ids:
                finish, stop = "stop", None if ends else token
                break
            sequence.append(token)
            taken.append(token)
            if sequence.length == len(sequence.tokens):
                finish = "length"
                break
        if constraint is not None and constraint.is_complete and len(taken) == len(tokens):
            finish = "stop"
        self._generated_tokens += len(taken)
        if constraint is not None and constraint.error is not None:
            return self._failed(sequence, constraint.error, 400)
        if state is not None:
            self._keep_state(sequence, state, sample)
        if logprobs is not None:
            logprobs = logprobs[: len(taken)]
        return replace(self._output(sequence, taken, logprobs, finish), stop_token=stop)

    def _keep_state(self, sequence: Sequence, state: SamplingState, sample: Sample | None) -> None:
        """What sampling must know of the token just appended, and forgets of what it no longer needs."""
        params = sequence.params
        if sample is not None and sample.mirostat_mu is not None:  # where `params.mirostat` is on
            state.mirostat_mu = sample.mirostat_mu
        if state.banned is not None and len(sequence.output) >= params.min_tokens:
            state.banned = None
            if state.breakers is None and state.constraint is None and not params.mirostat:
                sequence.sampling_state = None

    def _output(
        self,
        sequence: Sequence,
        tokens: list[int],
        logprobs: list[Any] | None,
        finish_reason: str | None,
        error: str | None = None,
    ) -> Output:
        """An output of a sequence, which ends with a `finish_reason`."""
        cached = sequence.cached_tokens or 0
        # the first output
        if sequence.length - len(sequence.prompt) == len(tokens) and finish_reason not in ("abort", "error"):
            self._first_token_seconds.observe(time.monotonic() - sequence.arrival)
            self._cached_tokens += cached
        prompt_logprobs = None
        if not sequence.scoring:
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if finish_reason is not None:
            self.scheduler.remove(sequence)
            del self._sequences[sequence.id]
        return Output(
            sequence.id, tokens, logprobs, finish_reason, len(sequence.prompt), cached, prompt_logprobs, error
        )

    def _failed(self, sequence: Sequence, error: str, status: int) -> Output:
        """The last output of a sequence that cannot go on, with this status of HTTP."""
        return replace(self._output(sequence, [], None, "error", error), error_status=status)

    def _score_prompt(self, chunk: SequenceChunk, logits: np.ndarray) -> str | None:
        """Takes the log probabilities of prompt tokens from the logits of the positions before them.

        Returns what went wrong.
        """
        sequence = chunk.sequence
        begin = chunk.first + chunk.tokens - chunk.rows  # the first position with logits
        end = min(chunk.first + chunk.tokens, len(sequence.prompt) - 1)
        top, scores = sequence.params.prompt_logprobs, sequence.prompt_logprobs
        if end > begin and top is not None and scores is not None:  # as with every sequence whose prompt is scored
            targets = sequence.tokens[begin + 1 : end + 1]
            try:
                samples = self.sampler.logprobs(logits[chunk.row : chunk.row + end - begin], targets, top)
            except CkdistError as error:
                return str(error)
            scores.extend(_entry(sample) for sample in samples)
            sequence.scored = end
        return None


def _row(sequence: Sequence) -> SampleRow:
    """What decides the next token of a sequence."""
    s = sequence
    return SampleRow(s.params, s.seed, s.length, s.prompt, s.output, s.sampling_state)


def _constraint(sequence: Sequence) -> Constraint:
    """Of a sequence that has a grammar."""
    state = sequence.sampling_state
    assert state is not None and state.constraint is not None, "it came with a grammar"
    return state.constraint


def _entry(sample: Sample) -> list[Any]:
    """A logprobs entry of an Output."""
    return [sample.logprob, [list(pair) for pair in sample.top]]
