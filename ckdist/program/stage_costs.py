"""How large steps are best where several stages work on steps at once: pieces of prompts, groups of sequences.

A step takes as long as reading its weights and computing its tokens; in units of a token, `step_cost` and one for each.
Prompts compute long, so what counts is that no stage idles and that weights are not read often. Decode mostly reads.
"""

import math
from dataclasses import dataclass

LEAST_PIECE, PIECE_UNIT = 64, 16  # tokens; products take rows by PIECE_UNIT


@dataclass(frozen=True)
class StageCosts:
    """Of `stages` stages: what a step takes whatever its size, in tokens of a prompt; behind how many tokens of context
    a token takes twice as long; and the part of a decode step that the slowest stage takes, from 1 / stages to 1.
    """

    stages: int = 1
    step_cost: float = 15.0
    doubling_context: float = math.inf
    slowest: float = 0.0

    def work(self, first: int, end: int) -> float:
        """Of tokens [first, end) of a prompt, in tokens without context."""
        return (end - first) * (1 + (first + end) / 2 / self.doubling_context)

    def pieces(self, work: float) -> int:
        """In how many pieces prompts of so much work go through the stages.

        All stages work but for the time of one piece for each stage after the first. So n pieces take (n + stages - 1)
        (step_cost + work / n), which is least for n = sqrt((stages - 1) work / step_cost).
        """
        if self.stages == 1:
            return 1
        return max(1, round(min(math.sqrt((self.stages - 1) * work / self.step_cost), work / LEAST_PIECE)))

    def piece_tokens(self, piece: float, left: float, first: int, most: int) -> int:
        """Tokens behind `first` others that are the next piece, `most` at most, where pieces are of about so much work
        and prompts have so much left. All that are left take as long: no stage then waits for a longer one in the stage
        before it.
        """
        count = round(left / piece)
        if self.stages == 1 or count <= 1:
            return most
        work, own = left / count, 1 + first / self.doubling_context  # own: of the first of them
        # the root of own * tokens + tokens**2 / (2 doubling_context) = work
        tokens = 2 * work / (own + math.sqrt(own * own + 2 * work / self.doubling_context))
        return min(most, max(LEAST_PIECE, round(tokens / PIECE_UNIT) * PIECE_UNIT))

    def groups(self, sequences: int) -> int:
        """In how many steps so many sequences decode a token each. A step passes one stage after the other, while each
        stage takes one step after the other.
        """

        def seconds(count: int) -> float:
            """Of a token of each sequence, in units of a token of a prompt."""
            step = self.step_cost + -(-sequences // count)
            return max(1.0, count * max(self.slowest, 1 / self.stages)) * step

        return min(range(1, max(1, min(self.stages, sequences)) + 1), key=seconds)


__all__ = ["LEAST_PIECE", "PIECE_UNIT", "StageCosts"]
