"""The best step sizes for several pipeline stages: chunks of prompts, and groups of sequences for decode.

Cost of a step = step_cost + tokens, in units of one prompt token; `step_cost` is the time to read the weights. Prompts
are bound by compute: chunks must keep all stages busy without reading the weights too often. Decode is bound by reads.
"""

import math
from dataclasses import dataclass

LEAST_PIECE, PIECE_UNIT = 64, 16  # tokens; products compute PIECE_UNIT rows at a time


@dataclass(frozen=True)
class StageCosts:
    """The costs of steps on `stages` pipeline stages."""

    stages: int = 1
    step_cost: float = 15.0  # fixed cost of a step, in prompt tokens
    doubling_context: float = math.inf  # tokens of context at which a token costs twice as much
    slowest: float = 0.0  # the slowest stage's part of a decode step, from 1 / stages to 1

    def work(self, first: int, end: int) -> float:
        """The cost of tokens [first, end) of a prompt, in tokens without context."""
        return (end - first) * (1 + (first + end) / 2 / self.doubling_context)

    def pieces(self, work: float) -> int:
        """The best number n of chunks for prompts that cost `work` in total.

        n chunks take (n + stages - 1) * (step_cost + work / n): filling the pipeline costs one chunk for each stage
        after the first. The minimum is at n = sqrt((stages - 1) * work / step_cost).
        """
        if self.stages == 1:
            return 1
        return max(1, round(min(math.sqrt((self.stages - 1) * work / self.step_cost), work / LEAST_PIECE)))

    def piece_tokens(self, piece: float, left: float, first: int, most: int) -> int:
        """The number of tokens in the next chunk.

        The remaining chunks get equal work, so that no stage waits for a longer chunk in the stage before it.

        Args:
            piece: Wanted work of a chunk.
            left: Work that is left.
            first: Tokens of context before the chunk.
            most: Upper bound on the result.
        """
        count = round(left / piece)
        if self.stages == 1 or count <= 1:
            return most
        work, own = left / count, 1 + first / self.doubling_context  # own: cost of the chunk's first token
        # `tokens` is the root of own * tokens + tokens**2 / (2 * doubling_context) = work
        tokens = 2 * work / (own + math.sqrt(own * own + 2 * work / self.doubling_context))
        return min(most, max(LEAST_PIECE, round(tokens / PIECE_UNIT) * PIECE_UNIT))

    def groups(self, sequences: int) -> int:
        """The best number of steps in which `sequences` sequences decode one token each.

        A step passes the stages in order, and each stage runs one step at a time.
        """

        def seconds(count: int) -> float:
            """Time for one token of each sequence, in units of one prompt token."""
            step = self.step_cost + -(-sequences // count)
            return max(1.0, count * max(self.slowest, 1 / self.stages)) * step

        return min(range(1, max(1, min(self.stages, sequences)) + 1), key=seconds)
