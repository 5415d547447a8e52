"""What a step of the engine brought for one sequence."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Output:
    """What a step brought for one sequence.

    `tokens` are new and never hold the token that ended the sequence (EOS or a stop id). A logprobs entry is
    [chosen_logprob, [[token, logprob], ...]]; `prompt_logprobs` comes once, with the first output, and starts with
    None.
    """

    id: Hashable
    tokens: list[int]
    logprobs: list[Any] | None
    finish_reason: str | None  # None, "stop", "length", "abort", "error"
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[Any] | None = None
    error: str | None = None  # what went wrong with this sequence alone
    error_status: int = 500  # of HTTP; 400 where the request is at fault
    stop_token: int | None = None  # of `stop_token_ids`, which ended the sequence; None for EOS
    cached_from: int = 0  # tokens of the earlier sequence that left the cached ones
    embedding: np.ndarray | None = None  # float32 (hidden,) or (tokens, hidden), of a prompt that was to be embedded
