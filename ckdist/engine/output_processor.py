"""Turns the rows of a step into outputs of its sequences: tokens, scores and vectors."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ckdist.engine.grammars import Grammars, Masks
from ckdist.engine.histogram import Histogram
from ckdist.engine.output import Output, joined
from ckdist.engine.sampler import Sample, Sampler
from ckdist.engine.sampling_state import SamplingState
from ckdist.engine.sequence import Sequence, State
from ckdist.engine.step_builder import SequenceChunk, agreed_drafts
from ckdist.errors import CkdistError

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)

Turn: TypeAlias = tuple[SequenceChunk, int]  # and its drafts that were drawn already


class OutputProcessor:
    """Samples from a step's logits, extends the sequences, and reports the sequences that end.

    Args:
        eos_token_ids: Tokens that end a sequence unless `ignore_eos`.
        grammars: Grammars of the vocabulary.
        finish: Called once with each sequence that ends.
    """

    def __init__(
        self,
        sampler: Sampler,
        eos_token_ids: Collection[int],
        grammars: Grammars | None,
        finish: Callable[[Sequence], None],
    ) -> None:
        self.sampler, self.eos_token_ids = sampler, frozenset(eos_token_ids)
        self.grammars, self._finish = grammars, finish
        self.generated_tokens = self.cached_tokens = 0
        self.first_token_seconds = Histogram(FIRST_TOKEN_SECONDS)

    def process(self, chunks: list[SequenceChunk], logits: np.ndarray) -> list[Output]:
        """Returns the outputs of a step with these logits, float32 (outputs, vocab)."""
        outputs: list[Output] = []
        turns: list[Turn] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is State.FINISHED:  # ended after the step was issued
                continue
            if sequence.scoring and (error := self._score_prompt(chunk, logits)) is not None:
                outputs.append(self.output(sequence, [], None, "error", error))
            elif chunk.samples and sequence.params.max_tokens == 0:
                outputs.append(self.output(sequence, [], None, "length"))
            elif chunk.samples and (output := self._without_sampling(sequence)) is not None:
                outputs.append(output)
            elif chunk.samples:
                turns.append((chunk, 0))
        if turns:
            made = self._draw(turns, logits)
            outputs += self._draw_drafts(turns, made, logits) if any(chunk.drafts for chunk, _ in turns) else made
        return outputs

    def _draw(self, turns: list[Turn], logits: np.ndarray) -> list[Output]:
        """Draws the next token of each sequence from the row after its drafts that were drawn already."""
        for chunk, agreed in turns:
            if chunk.drafts and chunk.sequence.state is State.RUNNING:
                chunk.sequence.computed = chunk.first + 1 + agreed
        sequences = [chunk.sequence for chunk, _ in turns]
        places = [chunk.row + chunk.rows - 1 - len(chunk.drafts) + agreed for chunk, agreed in turns]
        chosen = logits if len(places) == len(logits) else logits[places]  # (rows, vocab)
        samples = self._sample(chosen, sequences)
        self._advance_grammars(sequences, samples)
        return [self._extend(sequence, sample) for sequence, sample in zip(sequences, samples, strict=True)]

    def _draw_drafts(self, turns: list[Turn], made: list[Output], logits: np.ndarray) -> list[Output]:
        """Draws the rows after drafts, as long as all tokens of a sequence so far were its drafts.

        Args:
            made: Outputs with the first token of each sequence.

        Returns:
            One output per sequence.
        """
        outputs = {chunk.sequence.id: output for (chunk, _), output in zip(turns, made, strict=True)}
        while turns:
            going = [(chunk, agreed_drafts(chunk)) for chunk, _ in turns if chunk.drafts]
            turns = []
            for chunk, agreed in going:
                sequence = chunk.sequence
                if sequence.state is State.FINISHED or sequence.length != chunk.first + 1 + agreed:
                    continue
                if (output := self._without_sampling(sequence)) is not None:
                    outputs[sequence.id] = joined(outputs[sequence.id], output)
                else:
                    turns.append((chunk, agreed))
            if turns:
                if masks := self.begin_masks(chunk.sequence for chunk, _ in turns):
                    masks()
                for (chunk, _), output in zip(turns, self._draw(turns, logits), strict=True):
                    outputs[chunk.sequence.id] = joined(outputs[chunk.sequence.id], output)
        return list(outputs.values())

    def begin_masks(self, sequences: Iterable[Sequence]) -> Masks | None:
        """Starts the masks of next tokens. Returns None if no sequence has a grammar."""
        states = [sequence.sampling_state for sequence in sequences]
        followed = [(s.constraint, s.banned) for s in states if s is not None and s.constraint is not None]
        return self.grammars.begin_masks(followed) if followed and self.grammars is not None else None

    def pool(self, chunks: list[SequenceChunk], rows: np.ndarray) -> list[Output]:
        """Returns the outputs of a step with these hidden states, float32 (outputs, hidden)."""
        outputs: list[Output] = []
        for chunk in chunks:
            sequence = chunk.sequence
            pooling = sequence.pooling
            if pooling is None:  # an encoder has read its source
                continue
            if chunk.rows:
                pooling.take(rows[chunk.row : chunk.row + chunk.rows])
                sequence.scored = min(chunk.first + chunk.tokens, len(sequence.prompt) - 1)
            if chunk.samples:
                vector = pooling.vector()
                if np.isfinite(vector).all():
                    outputs.append(replace(self.output(sequence, [], None, "stop"), embedding=vector))
                else:
                    outputs.append(self.failed(sequence, "the model's hidden states are not finite numbers", 500))
        return outputs

    def _advance_grammars(self, sequences: list[Sequence], samples: Iterable[Sample | CkdistError]) -> None:
        """Moves each constraint on by its next token.

        This takes no longer than the mask that allowed the token. In another thread it would hold the GIL as well.
        """
        for sequence, sample in zip(sequences, samples, strict=True):
            state = sequence.sampling_state
            if state is None or state.constraint is None or not isinstance(sample, Sample):
                continue
            if not self._is_end(sequence, sample.token):
                state.constraint.advance(sample.token)

    def _is_end(self, sequence: Sequence, token: int) -> bool:
        return token in self.eos_token_ids and (not sequence.params.ignore_eos or sequence.params.grammar is not None)

    def _sample(self, logits: np.ndarray, rows: list[Sequence]) -> list[Sample] | list[Sample | CkdistError]:
        """One sample per row, or the row's error, so that one bad row does not fail the others."""
        try:
            return self.sampler.sample(logits, rows)
        except CkdistError as error:
            return (
                [error]
                if len(rows) == 1
                else [self._sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
            )

    def _extend(self, sequence: Sequence, sample: Sample | CkdistError) -> Output:
        """Adds a sampled token to its sequence, or ends the sequence."""
        if isinstance(sample, CkdistError):
            return self.output(sequence, [], None, "error", str(sample))
        logprobs = None if sequence.params.logprobs is None else [_entry(sample)]
        return self._take_tokens(sequence, [sample.token], logprobs, sample)

    def _without_sampling(self, sequence: Sequence) -> Output | None:
        """The output that a grammar alone decides: its error or forced tokens. None if a token must be sampled."""
        state = sequence.sampling_state
        constraint = None if state is None else state.constraint
        if constraint is None:
            return None
        if constraint.error is not None:
            return self.failed(sequence, constraint.error, 400)
        if constraint.forced and sequence.params.logprobs is None:
            return self._take_tokens(sequence, [], None)
        return None

    def _take_tokens(
        self, sequence: Sequence, tokens: list[int], logprobs: list[Any] | None, sample: Sample | None = None
    ) -> Output:
        """Adds tokens and those that the grammar forces after them, until one of them ends the sequence."""
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
        self.generated_tokens += len(taken)
        if constraint is not None and constraint.error is not None:
            return self.failed(sequence, constraint.error, 400)
        if state is not None:
            self.keep_state(sequence, state, sample)
        if logprobs is not None:
            logprobs = logprobs[: len(taken)]
        return replace(self.output(sequence, taken, logprobs, finish), stop_token=stop)

    def keep_state(self, sequence: Sequence, state: SamplingState, sample: Sample | None) -> None:
        """Updates the sampling state after a token and drops the parts that are no longer needed."""
        params = sequence.params
        if sample is not None and sample.mirostat_mu is not None:  # if `params.mirostat` is on
            state.mirostat_mu = sample.mirostat_mu
        if state.banned is not state.always and len(sequence.output) >= params.min_tokens:
            state.banned = state.always
            is_needed = state.banned is not None or state.breakers is not None or state.constraint is not None
            if not is_needed and not params.mirostat:
                sequence.sampling_state = None

    def output(
        self,
        sequence: Sequence,
        tokens: list[int],
        logprobs: list[Any] | None,
        finish_reason: str | None,
        error: str | None = None,
    ) -> Output:
        """Makes an output of a sequence. With a `finish_reason` the sequence ends."""
        cached = sequence.cached_tokens or 0
        use = None
        # This is the first output.
        if sequence.length - len(sequence.prompt) == len(tokens) and finish_reason not in ("abort", "error"):
            self.first_token_seconds.observe(time.monotonic() - sequence.arrival)
            self.cached_tokens += cached
            use = sequence.cache_use
        prompt_logprobs = None
        if not sequence.scoring:
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if finish_reason is not None:
            self._finish(sequence)
        return Output(
            sequence.id, tokens, logprobs, finish_reason, sequence.prompt_tokens, cached, prompt_logprobs, error,
            cached_from=sequence.cached_from, cache_use=use,
        )  # fmt: skip

    def failed(self, sequence: Sequence, error: str, status: int) -> Output:
        """Ends a sequence with an error of this HTTP status."""
        return replace(self.output(sequence, [], None, "error", error), error_status=status)

    def _score_prompt(self, chunk: SequenceChunk, logits: np.ndarray) -> str | None:
        """Adds log probabilities of prompt tokens, from the logits of the positions before them.

        Returns an error message, or None.
        """
        sequence = chunk.sequence
        begin = chunk.first + chunk.tokens - chunk.rows  # the first position with logits
        end = min(chunk.first + chunk.tokens, len(sequence.prompt) - 1)
        top, scores = sequence.params.prompt_logprobs, sequence.prompt_logprobs
        if end > begin and top is not None and scores is not None:  # always so while a prompt is scored
            targets = sequence.tokens[begin + 1 : end + 1]
            try:
                samples = self.sampler.logprobs(logits[chunk.row : chunk.row + end - begin], targets, top)
            except CkdistError as error:
                return str(error)
            scores.extend(_entry(sample) for sample in samples)
            sequence.scored = end
        return None


def _entry(sample: Sample) -> list[Any]:
    """A logprobs entry of an Output."""
    return [sample.logprob, [list(pair) for pair in sample.top]]
