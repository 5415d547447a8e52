"""Predicts the seconds of prompts' tokens and of decode steps from the steps so far."""

from collections.abc import Iterable

from ckdist.engine.step_builder import SequenceChunk
from ckdist.program.stage_costs import PIECE_UNIT

MEMORY = 0.7  # weight of all earlier steps against the last one
BAND_TOKENS = 1024  # of context; attention makes a token's seconds grow with it
NOMINAL_SECONDS = 1e-3  # of a token if nothing was measured: shares are then in tokens
UNMEASURED_TOKENS = 64  # in a step with a limit of seconds, before the first measurement


class StepSpeed:
    """Measured seconds of steps.

    Seconds per prompt token are kept by band of context: [0, 1), [1, 3), [3, 7) ... times BAND_TOKENS.

    Attributes:
        decode_seconds: Seconds of a step without prompts; 0 before the first one.
        start_seconds: Seconds of a prompt token before the first step with prompts.
    """

    def __init__(self) -> None:
        self.decode_seconds, self.start_seconds = 0.0, NOMINAL_SECONDS
        self._bands: dict[int, tuple[float, float]] = {}  # (tokens, seconds), faded

    def observe(self, chunks: Iterable[SequenceChunk], seconds: float) -> None:
        """Takes the measured seconds of a step."""
        chunks = list(chunks)
        prompts = [chunk for chunk in chunks if not chunk.decodes]
        if not prompts:
            self.decode_seconds = _faded(self.decode_seconds or seconds, seconds)
            return
        if len(prompts) < len(chunks):
            seconds = max(0.0, seconds - self.decode_seconds)
        predicted = [self.prompt_seconds(chunk.first, chunk.tokens) for chunk in prompts]
        correction = seconds / sum(predicted)
        for chunk, part in zip(prompts, predicted, strict=True):
            band = _band(chunk.first + chunk.tokens // 2)
            tokens, spent = self._bands.get(band, (0.0, 0.0))
            self._bands[band] = MEMORY * tokens + chunk.tokens, MEMORY * spent + max(part * correction, 1e-9)

    def prompt_seconds(self, first: int, tokens: int) -> float:
        """Seconds of `tokens` prompt tokens after `first` tokens of context."""
        return tokens * self._token_seconds(first + tokens // 2)

    def prompt_tokens(self, seconds: float, first: int) -> int:
        """Most prompt tokens after `first` tokens of context within `seconds`."""
        if not self._bands:
            return UNMEASURED_TOKENS
        tokens = max(0, int(min(seconds / self._token_seconds(first), 1 << 30)))
        return tokens if tokens < PIECE_UNIT else tokens // PIECE_UNIT * PIECE_UNIT

    def seconds(self, chunks: list[SequenceChunk]) -> list[float]:
        """The part of each chunk in the seconds of their step."""
        decodes = sum(chunk.decodes for chunk in chunks)
        decode = (self.decode_seconds or decodes * NOMINAL_SECONDS) / max(1, decodes)
        return [decode if chunk.decodes else self.prompt_seconds(chunk.first, chunk.tokens) for chunk in chunks]

    def _token_seconds(self, context: int) -> float:
        """Seconds of a prompt token in the measured band that is nearest to `context`."""
        if not self._bands:
            return self.start_seconds
        wanted = _band(context)
        tokens, seconds = self._bands[min(self._bands, key=lambda band: abs(band - wanted))]
        return seconds / tokens


def _band(context: int) -> int:
    return (context // BAND_TOKENS + 1).bit_length()


def _faded(before: float, now: float) -> float:
    return MEMORY * before + (1 - MEMORY) * now
