"""The shape of a step: tokens and cached context of its sequences, and rows of logits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunks:
    """`count` sequences of the same shape."""

    count: int
    tokens: int  # per sequence
    context: int = 0  # cached tokens before these

    def seen(self, window: int) -> float:
        """Positions that the tokens of one sequence attend to, summed over its tokens."""
        whole = self.tokens * (self.context + self.tokens / 2)
        return min(whole, float(self.tokens * window)) if window else whole

    def read(self, window: int) -> float:
        """Positions of the cache that are read for one sequence."""
        end = self.context + self.tokens
        return min(end, self.tokens + window) if window else end


@dataclass(frozen=True)
class StepShape:
    """The shape of one step."""

    chunks: tuple[Chunks, ...]
    outputs: int  # rows of logits

    @staticmethod
    def prompt(tokens: int, context: int = 0) -> "StepShape":
        """A step with a chunk of one prompt and one row of logits."""
        return StepShape((Chunks(1, tokens, context),), 1)

    @staticmethod
    def decode(sequences: int, context: int) -> "StepShape":
        """A step with one token of each sequence, after `context` tokens of context."""
        return StepShape((Chunks(sequences, 1, context),), sequences)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(chunk.count * chunk.tokens for chunk in self.chunks)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return sum(chunk.count for chunk in self.chunks)
