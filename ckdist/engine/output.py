"""The output of one sequence in one step."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckdist.engine.prefix_use import CacheUse


@dataclass(frozen=True)
class Output:
    """The output of one sequence in one step.

    A logprobs entry is [chosen_logprob, [[token, logprob], ...]].
    """

    id: Hashable
    tokens: list[int]  # new ones, without the token that ended the sequence (EOS or a stop id)
    logprobs: list[Any] | None
    finish_reason: str | None  # None, "stop", "length", "abort", "error"
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[Any] | None = None  # with the first output only; the first entry is None
    error: str | None = None  # why this sequence alone failed
    error_status: int = 500  # HTTP status; 400 if the request is at fault
    stop_token: int | None = None  # the one of `stop_token_ids` that ended the sequence; None for EOS
    cached_from: int = 0  # tokens of the earlier sequence that left the cached ones
    cache_use: CacheUse | None = None  # with the first output only
    embedding: np.ndarray | None = None  # float32 (hidden,) or (tokens, hidden), from `Engine.embed`


def joined(first: Output, second: Output) -> Output:
    """One output for two of the same sequence in one step."""
    logprobs = first.logprobs if second.logprobs is None else (first.logprobs or []) + second.logprobs
    return replace(
        first, tokens=first.tokens + second.tokens, logprobs=logprobs, finish_reason=second.finish_reason,
        error=second.error, error_status=second.error_status, stop_token=second.stop_token,
    )  # fmt: skip
