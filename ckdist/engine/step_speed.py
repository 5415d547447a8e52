"""Predicts the seconds of prompts' tokens and of decode steps from the steps so far."""

import math
from collections.abc import Iterable

from ckdist.engine.step_builder import SequenceChunk
from ckdist.program.stage_costs import PIECE_UNIT

MEMORY = 0.7  # weight of all earlier steps against the last one
USUAL_FADES = 0.9  # per step
NOMINAL_SECONDS = 1e-3  # of a token if nothing was measured: shares are then in tokens
UNMEASURED_TOKENS = 64  # in a step with a limit of seconds, before the first measurement
LEAST_CORRECTION = 0.1  # before the first measurement: the difference of two steps may be 0 by chance
SPREAD = 512.0  # of the contexts in the memory; if they differ by less, the slope stays almost as it was


class StepSpeed:
    """Measured seconds of steps.

    A prompt token after c tokens of context takes level + slope * c seconds, because attention reads the context. Both
    are a least-squares fit over the last steps. A small step reads the weights for few tokens, so it says little about
    a large one: earlier steps fade by its tokens.

    Attributes:
        decode_seconds: Seconds of a step without prompts; 0 before the first one.
        start_seconds: Seconds of a prompt token before the first step with prompts.
    """

    def __init__(self) -> None:
        self.decode_seconds, self.start_seconds = 0.0, NOMINAL_SECONDS
        self._level = self._slope = 0.0
        self._usual = 0.0  # prompt tokens of a step: the most of the last ones
        self._measured = False  # a step had UNMEASURED_TOKENS prompt tokens or more
        # Faded sums over tokens: 1, c, c * c, seconds, seconds * c.
        self._sums = [0.0] * 5

    def observe(self, chunks: Iterable[SequenceChunk], seconds: float) -> None:
        """Takes the measured seconds of a step."""
        chunks = list(chunks)
        prompts = [chunk for chunk in chunks if not chunk.decodes]
        if not prompts:
            self.decode_seconds = _faded(self.decode_seconds or seconds, seconds)
            return
        total = sum(chunk.tokens for chunk in prompts)
        if len(prompts) < len(chunks):
            rest = self.decode_seconds or seconds * (1 - total / sum(chunk.tokens for chunk in chunks))
            seconds = max(0.0, seconds - rest)
        predicted = [self.prompt_seconds(chunk.first, chunk.tokens) for chunk in prompts]
        correction = max(seconds, 1e-9) / sum(predicted)
        if not self._measured:
            correction = max(correction, LEAST_CORRECTION)
        self._usual = max(USUAL_FADES * self._usual, total)
        memory = MEMORY ** (total / self._usual)
        if not self._measured and total >= UNMEASURED_TOKENS:
            self._measured, memory = True, 0.0
        elif not self._measured and correction < 1:
            memory = 0.0  # a small step takes time for more than its tokens, e.g. to pack weights: the fastest counts
        sums = [memory * value for value in self._sums]
        for chunk, part in zip(prompts, predicted, strict=True):
            context, own = chunk.first + chunk.tokens / 2, part * correction / chunk.tokens
            for i, value in enumerate((1.0, context, context**2, own, own * context)):
                sums[i] += chunk.tokens * value
        self._sums = sums
        self._fit()

    def prompt_seconds(self, first: int, tokens: int) -> float:
        """Seconds of `tokens` prompt tokens after `first` tokens of context."""
        return tokens * self._token_seconds(first + tokens / 2)

    def prompt_tokens(self, seconds: float, first: int) -> int:
        """Most prompt tokens after `first` tokens of context within `seconds`."""
        if not self._sums[0]:
            return UNMEASURED_TOKENS
        # The positive root of tokens * (begin + slope * tokens / 2) = seconds.
        begin = self._token_seconds(first)
        tokens = 2 * seconds / (begin + math.sqrt(begin**2 + 2 * self._slope * max(0.0, seconds)))
        tokens = max(0, int(min(tokens, 1 << 30 if self._measured else UNMEASURED_TOKENS)))
        return tokens if tokens < PIECE_UNIT else tokens // PIECE_UNIT * PIECE_UNIT

    def seconds(self, chunks: list[SequenceChunk]) -> list[float]:
        """The part of each chunk in the seconds of their step."""
        decodes = sum(chunk.decodes for chunk in chunks)
        decode = (self.decode_seconds or decodes * NOMINAL_SECONDS) / max(1, decodes)
        return [decode if chunk.decodes else self.prompt_seconds(chunk.first, chunk.tokens) for chunk in chunks]

    def _token_seconds(self, context: float) -> float:
        tokens, _, _, spent, _ = self._sums
        if not tokens:
            return self.start_seconds
        return max(self._level + self._slope * context, spent / tokens / 8)  # a line may be wrong far from its points

    def _fit(self) -> None:
        """Fits level and slope. The slope is drawn to its last value as if that had been seen over SPREAD tokens."""
        tokens, contexts, squares, spent, products = self._sums
        mean, weight = contexts / tokens, tokens * SPREAD**2
        self._slope = max(0.0, (products - spent * mean + weight * self._slope) / (squares - contexts * mean + weight))
        self._level = spent / tokens - self._slope * mean


def _faded(before: float, now: float) -> float:
    return MEMORY * before + (1 - MEMORY) * now
