"""What the engine asks of the parts that it brings together: an executable, a sampler, a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ckdist.engine.sampler import Sample, SampleRow
from ckdist.program.batch import Batch
from ckdist.program.stage_costs import StageCosts
from ckdist.tokens.chat import ChatTemplate


class StepExecutable(Protocol):
    """Runs steps over a KV cache (`ckdist.program.executable`)."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, of BLOCK_TOKENS positions each."""
        ...

    @property
    def state_slots(self) -> int:
        """How many sequences' states it holds; 0: no layer keeps one."""
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
    def has_logits(self) -> bool:
        """Whether it makes logits; an encoder does not."""
        ...

    @property
    def has_hidden(self) -> bool:
        """Whether it makes hidden states."""
        ...

    @property
    def in_flight(self) -> int:
        """How many steps may be issued before the first of them is collected."""
        ...

    @property
    def costs(self) -> StageCosts:
        """How large steps are best where several are under way."""
        ...

    def publish(self, batch: Batch, /) -> None:
        """Issues one step. Raises EngineError."""
        ...

    def collect(self) -> np.ndarray:
        """Of the oldest step: float32 (outputs, vocab) logits or (outputs, hidden) hidden states, valid until the next
        call. Raises EngineError.
        """
        ...

    def run(self, batch: Batch, /) -> np.ndarray:
        """Issues and collects one step, where no other is under way."""
        ...


class TokenSampler(Protocol):
    """Chooses tokens (`ckdist.engine.sampler`)."""

    def sample(self, logits: np.ndarray, rows: Sequence[SampleRow], /) -> list[Sample]:
        """One token per row of float32 (rows, vocab) logits. Raises CkdistError for a row that allows none."""
        ...

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, top: int, /) -> list[Sample]:
        """Log probabilities of int32 (rows,) targets, and of the `top` most likely tokens."""
        ...


class TextDecoder(Protocol):
    """Turns the tokens of one text into characters."""

    def step(self, token: int, /) -> str:
        """The characters that are complete with this token, never half of one."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class TextTokenizer(Protocol):
    """Turns texts into tokens and back."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """What renders a chat as a text; None where the model has no such template."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The token ids of a text, with BOS and the like where `add_special` says so."""
        ...

    def chat_tokens(self, messages: Sequence[Mapping[str, object]], special_in_text: bool = False) -> list[int]:
        """The token ids of a chat, in whose messages control tokens are text unless `special_in_text`."""
        ...

    def decoder(self) -> TextDecoder:
        """A decoder for one text."""
        ...
