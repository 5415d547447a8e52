"""A step and its builder, which keeps the step within its budgets of tokens and of rows of logits."""

import math
from typing import NamedTuple

from ckdist.engine.sequence import Sequence
from ckdist.engine.sequence_state import NO_ROW, StateRow

AIM = 0.9  # of the limit of a step: a prediction errs by some per cent
LEAST_PROMPT_PART = 0.25  # for prompts: of the limit, or of the decoding if that takes longer


class SequenceChunk(NamedTuple):
    """A sequence's part of a step: positions [first, first + tokens).

    The last `rows` of them have logits, in rows [row, row + rows) of the step.
    """

    sequence: Sequence
    first: int
    tokens: int
    row: int
    rows: int
    states: StateRow  # NO_ROW if no layer keeps states
    drafts: tuple[int, ...] = ()  # its last tokens, which are guessed and not part of the sequence

    @property
    def samples(self) -> bool:
        """True if its last logits choose the sequence's next token."""
        return self.first + self.tokens - len(self.drafts) == self.sequence.length

    @property
    def decodes(self) -> bool:
        """True if it computes one token, and drafts after it, in order to sample the next one."""
        return self.tokens == self.rows == 1 + len(self.drafts)


class Step(NamedTuple):
    """The chunks that a step computes, in this order."""

    chunks: list[SequenceChunk]
    hidden: bool  # hidden states are wanted in place of logits
    prompts: bool | None = None  # the tokens are prompts', or generated; None: a step may have both


class StepBuilder:
    """Makes the chunks of one step within its budgets. It changes no sequence, but takes slots for saved states."""

    def __init__(self, budget: int, max_outputs: int, whole_prompts: bool, prompts: bool | None = None) -> None:
        self.budget = budget  # most tokens of the step; the scheduler may change it between two chunks
        self.max_outputs = max_outputs  # most rows of logits or hidden states of the step
        self.prompts = prompts  # as in Step
        self.seconds = math.inf  # predicted seconds that are left for prompts
        self.batch_seconds = math.inf  # and for those of batches
        self.whole_prompts = whole_prompts  # prompts whose hidden states are wanted are added whole or not at all
        self.chunks: list[SequenceChunk] = []
        self.tokens = 0  # of the chunks
        self.outputs = 0  # rows of the chunks

    @property
    def has_room(self) -> bool:
        """True if the step may have more tokens of prompts."""
        return self.tokens < self.budget and self.seconds > 0

    def limit_seconds(self, most: float, decode_seconds: float) -> None:
        """Limits prompts in a step of `most` seconds. Decoding takes `decode_seconds` of them."""
        self.seconds = max(AIM * most - decode_seconds, LEAST_PROMPT_PART * max(most, decode_seconds))

    def add(self, sequence: Sequence) -> None:
        """Adds the sequence's next tokens, as far as the budgets allow."""
        first, row, budget = sequence.computed, self.outputs, self.budget - self.tokens
        end = len(sequence.prompt) if self.prompts else sequence.length
        own = sequence.state_slots
        tokens = min(end - first, budget)
        if own is not None:
            tokens = own.most_tokens(sequence, first, tokens)
        if sequence.source is not None and not sequence.encoded:
            tokens, rows = len(sequence.source), 0
            if tokens > budget:
                return  # an encoder reads its source whole
        elif sequence.scoring:
            begin = max(first, sequence.scored)
            tokens = min(tokens, begin - first + self.max_outputs - row)
            rows = max(0, first + tokens - begin)
        elif first + tokens < sequence.length:
            rows = 0
        elif row < self.max_outputs:
            rows = 1
        else:  # no row is left for the logits of the last token
            tokens, rows = tokens - 1, 0
        if tokens <= 0 or (self.whole_prompts and sequence.pooling is not None and tokens < sequence.length):
            return  # a later step takes a whole prompt before later arrivals
        states = NO_ROW if own is None else own.row(sequence, first, tokens)
        self.chunks.append(SequenceChunk(sequence, first, tokens, row, rows, states))
        self.tokens += tokens
        self.outputs += rows


def agreed_drafts(chunk: SequenceChunk) -> int:
    """How many drafts of a chunk agree with the tokens that were drawn."""
    drawn = chunk.sequence.tokens[chunk.first + 1 : chunk.sequence.length].tolist()
    pairs = zip(chunk.drafts, drawn, strict=False)
    return next((i for i, (draft, token) in enumerate(pairs) if draft != token), min(len(drawn), len(chunk.drafts)))
