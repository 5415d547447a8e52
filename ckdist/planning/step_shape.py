"""What a step computes, in numbers: tokens of sequences, behind what is cached of them, and rows of logits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunks:
    """`count` sequences that are alike: of each so many tokens, behind so many others that are cached."""

    count: int
    tokens: int
    context: int = 0

    def seen(self, window: int) -> float:
        """Positions that the tokens of one of the sequences attend to, added up."""
        whole = self.tokens * (self.context + self.tokens / 2)
        return min(whole, float(self.tokens * window)) if window else whole

    def read(self, window: int) -> float:
        """Positions of the cache that are read of one of the sequences."""
        end = self.context + self.tokens
        return min(end, self.tokens + window) if window else end


@dataclass(frozen=True)
class StepShape:
    """What one step computes: tokens of some sequences, and how many rows of logits."""

    chunks: tuple[Chunks, ...]
    outputs: int

    @staticmethod
    def prompt(tokens: int, context: int = 0) -> "StepShape":
        """A part of one prompt, which ends with a row of logits."""
        return StepShape((Chunks(1, tokens, context),), 1)

    @staticmethod
    def decode(sequences: int, context: int) -> "StepShape":
        """A token of each of some sequences, behind `context` others."""
        return StepShape((Chunks(sequences, 1, context),), sequences)

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(chunk.count * chunk.tokens for chunk in self.chunks)

    @property
    def sequences(self) -> int:
        """That take part."""
        return sum(chunk.count for chunk in self.chunks)
