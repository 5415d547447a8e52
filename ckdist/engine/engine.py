"""The engine: requests in, tokens out, one step at a time.

It owns the sequences from `add` to their finish, and brings scheduler, executable and sampler together. It knows
nothing of text, sockets or clocks other than for its counters; it is used by one thread.
"""

import secrets
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.dry_breakers import DryBreakers
from ckdist.engine.histogram import Histogram
from ckdist.engine.protocol import StepExecutable, TokenSampler
from ckdist.engine.request import Tokens, check_prompt, check_sampling
from ckdist.engine.sampler import Sample, SampleRow
from ckdist.engine.sampling import SamplingParams
from ckdist.engine.sampling_state import SamplingState, sampling_state
from ckdist.engine.scheduler import EngineBusy, Scheduler, SequenceChunk
from ckdist.engine.sequence import Sequence
from ckdist.engine.state_pool import SequenceState, StatePool
from ckdist.engine.trace import Lane
from ckdist.errors import CkdistError, RequestError
from ckdist.native import lib
from ckdist.program.batch import BLOCK_TOKENS, Batch

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
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
    stop_token: int | None = None  # of `stop_token_ids`, which ended the sequence; None for EOS


class Engine:
    """Continuous batching over one executable."""

    def __init__(
        self, executable: StepExecutable, sampler: TokenSampler, eos_token_ids: Collection[int] = (), *,
        max_waiting: int = 512, max_outputs: int | None = None, prefix_reuse: bool = True,
        more_stats: Callable[[], Mapping[str, float | str]] = dict, lane: Lane | None = None,
        dry_breakers: DryBreakers | None = None,
    ) -> None:  # fmt: skip
        """eos_token_ids: end a sequence unless `ignore_eos`. max_waiting: length of the queue.

        max_outputs: rows of logits of one step, where fewer than its tokens. more_stats: numbers that `stats` gives
        besides the engine's own. lane: of a trace, where there is one. dry_breakers: of the vocabulary; without,
        requests for DRY with sequence breakers are refused.
        """
        self.executable, self.sampler, self.eos_token_ids = executable, sampler, frozenset(eos_token_ids)
        self.vocab_size, self._more_stats, self.lane = executable.vocab_size, more_stats, lane
        self._dry_breakers = dry_breakers
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
        )  # fmt: skip
        self._sequences: dict[Hashable, Sequence] = {}
        self._requests = self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._step_seconds, self._first_token_seconds = Histogram(STEP_SECONDS), Histogram(FIRST_TOKEN_SECONDS)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._sequences)

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
        if id in self._sequences:
            raise RequestError("a request with this id is running; choose another id", "id")
        check_sampling(params, self.vocab_size)
        most = self.max_positions - (params.max_tokens > 0)
        if len(prompt) > most:
            raise RequestError(
                f"prompt of {len(prompt)} tokens does not fit {self._room}, "
                f"which takes {most} and the output; shorten the prompt or raise --ctx-size",
                "prompt",
            )
        ids = check_prompt(prompt, self.vocab_size)
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**64
        self.scheduler.check_room()
        breakers = self._dry_breakers if "dry" in params.active_samplers else None
        if breakers is not None and not breakers.has_room(params.dry_sequence_breakers):
            raise EngineBusy("too many sets of dry_sequence_breakers are being prepared; try again later")
        state = sampling_state(params, self.eos_token_ids, self.vocab_size, self._dry_breakers)
        capacity = min(len(ids) + params.max_tokens, self.max_positions)
        sequence = Sequence(id, ids, params, seed, capacity, time.monotonic(), state)
        self.scheduler.add(sequence)
        self._sequences[id] = sequence
        self._requests += 1
        self._prompt_tokens += len(ids)

    def step(self) -> list[Output]:
        """Runs one batch. Raises EngineError when a rank is lost; the sequences are then lost as well."""
        begin = time.monotonic_ns()
        step = self.scheduler.schedule()
        if step is None:
            self._wait_for_breakers()
            return []
        scheduled = time.monotonic_ns()
        logits = self.executable.run(step.batch)  # (outputs, vocab)
        ran = time.monotonic_ns()
        self.scheduler.commit(step)
        outputs = self._outputs(step.chunks, logits)
        end = time.monotonic_ns()
        self._step_seconds.observe((end - begin) * 1e-9)
        if self.lane is not None:
            size = len(step.batch.token_ids), len(step.batch.chunks)
            self.lane.add(lib.ckdist_trace_schedule, begin, scheduled, *size)
            self.lane.add(lib.ckdist_trace_run, scheduled, ran, *size)
            self.lane.add(lib.ckdist_trace_sample, ran, end, len(outputs))
        return outputs

    def _wait_for_breakers(self) -> None:
        """Waits a moment for the head of the queue, where it is that which nothing can be done without."""
        waiting = self.scheduler.waiting
        state = waiting[0].sampling_state if waiting else None
        if state is not None and state.breakers is not None and not state.is_ready:
            wait([state.breakers], timeout=0.01)

    def abort(self, id: Hashable) -> Output | None:
        """Ends a sequence and frees its blocks at once. None when there is none of that id."""
        sequence = self._sequences.get(id)
        return None if sequence is None else self._output(sequence, [], None, "abort")

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
            if sequence.scoring and (error := self._score_prompt(chunk, logits)) is not None:
                outputs.append(self._output(sequence, [], None, "error", error))
            elif chunk.samples and sequence.params.max_tokens == 0:
                outputs.append(self._output(sequence, [], None, "length"))
            elif chunk.samples:
                sequences.append(sequence)
                places.append(chunk.row + chunk.rows - 1)
                rows.append(_row(sequence))
        if rows:
            chosen = logits if len(places) == len(logits) else logits[places]  # (rows, vocab)
            for sequence, sample in zip(sequences, self._sample(chosen, rows), strict=True):
                outputs.append(self._extend(sequence, sample))
        return outputs

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
        token, params = sample.token, sequence.params
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            stop = None if token in self.eos_token_ids and not params.ignore_eos else token
            return replace(self._output(sequence, [], None if params.logprobs is None else [], "stop"), stop_token=stop)
        sequence.append(token)
        if sequence.sampling_state is not None:
            self._keep_state(sequence, sequence.sampling_state, sample)
        self._generated_tokens += 1
        full = sequence.length == len(sequence.tokens)
        logprobs = None if params.logprobs is None else [_entry(sample)]
        return self._output(sequence, [token], logprobs, "length" if full else None)

    def _keep_state(self, sequence: Sequence, state: SamplingState, sample: Sample) -> None:
        """What sampling must know of the token just appended, and forgets of what it no longer needs."""
        params = sequence.params
        if sample.mirostat_mu is not None:  # where `params.mirostat` is on
            state.mirostat_mu = sample.mirostat_mu
        if state.banned is not None and len(sequence.output) >= params.min_tokens:
            state.banned = None
            if state.breakers is None and not params.mirostat:
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


def _entry(sample: Sample) -> list[Any]:
    """A logprobs entry of an Output."""
    return [sample.logprob, [list(pair) for pair in sample.top]]
