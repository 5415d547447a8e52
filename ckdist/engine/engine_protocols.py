"""Interfaces of the parts that the engine joins: an executable, a sampler, a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ckdist.engine import sequence
from ckdist.engine.sampler import Sample
from ckdist.program.stage_costs import StageCosts
from ckdist.program.step_batch import Batch
from ckdist.tokens.chat_template import ChatTemplate


class StepExecutable(Protocol):
    """Runs steps over a KV cache (`ckdist.program.executable`)."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, with BLOCK_TOKENS positions each."""
        ...

    @property
    def state_slots(self) -> int:
        """Number of sequences whose states it holds; 0 if no layer keeps states."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step."""
        ...

    @property
    def max_sequences(self) -> int:
        """Most sequences of a step."""
        ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def context_length(self) -> int:
        """Most positions of one sequence."""
        ...

    @property
    def splits_roles(self) -> bool:
        """Whether a step has either prompts' tokens or generated ones."""
        ...

    @property
    def has_logits(self) -> bool:
        """Whether it computes logits. An encoder does not."""
        ...

    @property
    def has_hidden(self) -> bool:
        """Whether it computes hidden states."""
        ...

    @property
    def in_flight(self) -> int:
        """Steps that may be issued before the first of them is collected."""
        ...

    @property
    def costs(self) -> StageCosts:
        """Costs that determine the size of steps if several are under way."""
        ...

    def publish(self, batch: Batch, /) -> None:
        """Issues one step. Raises EngineError."""
        ...

    def collect(self) -> np.ndarray:
        """Waits for the oldest step. Its rows are valid until the next call. Raises EngineError.

        Returns:
            float32 (outputs, vocab) logits, or (outputs, hidden) hidden states.
        """
        ...

    def run(self, batch: Batch, /) -> np.ndarray:
        """Issues and collects one step. No other step may be under way."""
        ...


class TokenSampler(Protocol):
    """Chooses tokens (`ckdist.engine.sampler`)."""

    def sample(self, logits: np.ndarray, rows: list[sequence.Sequence], /) -> list[Sample]:
        """Draws one token per row of float32 (rows, vocab) logits. Raises CkdistError for a row that allows none."""
        ...

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, top: int, /) -> list[Sample]:
        """Log probabilities of int32 (rows,) targets, and of the `top` most likely tokens."""
        ...


class TextDecoder(Protocol):
    """Turns the tokens of one text into characters."""

    def step(self, token: int, /) -> str:
        """The characters that this token completes."""
        ...

    def flush(self) -> str:
        """The rest of the text at its end."""
        ...


class TextTokenizer(Protocol):
    """Turns texts into tokens and back."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, or None."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The token ids of a text. `add_special` adds BOS and the like."""
        ...

    def chat_tokens(self, messages: Sequence[Mapping[str, object]], special_in_text: bool = False) -> list[int]:
        """The token ids of a chat. Control tokens in its messages are plain text unless `special_in_text`."""
        ...

    def decoder(self) -> TextDecoder:
        """A decoder for one text."""
        ...
