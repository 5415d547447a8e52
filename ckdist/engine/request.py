"""Checks of a prompt and its sampling parameters against the model."""

from collections.abc import Sequence, Sized
from typing import TypeAlias

import numpy as np

from ckdist.config.samplers import MAX_BREAKER_BYTES, MAX_BREAKERS, SAMPLERS
from ckdist.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, PARAMETERS, SamplingParams
from ckdist.engine.typed_records import WORDS, converted
from ckdist.errors import RequestError

MAX_SAMPLERS = 32
MAX_ALL_BREAKER_BYTES = 512
BREAKERS = "dry_sequence_breakers"  # the field

Tokens: TypeAlias = Sequence[int] | np.ndarray  # token ids, (tokens,)


def check_prompt(prompt: Tokens, vocab_size: int) -> np.ndarray:
    """Returns the prompt as int32 (tokens,). Raises RequestError if it is empty or has a wrong token id."""
    if len(prompt) == 0:
        raise RequestError("prompt is empty; give at least one token", "prompt")
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty(0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("prompt must hold token ids, which are integers", "prompt")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}", "prompt")
    return ids.astype(np.int32)


def check_positions(positions: np.ndarray, tokens: int, context: int) -> np.ndarray:
    """Returns positions of three axes as int32 (tokens, 3).

    Raises RequestError if they have another shape, or if a position is not less than `context`.
    """
    if positions.shape != (tokens, 3) or positions.dtype.kind not in "iu":
        raise RequestError(
            f"positions have the shape {positions.shape} and type {positions.dtype}; give three integers for each of "
            f"{tokens} tokens",
            "positions",
        )
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= context:
        raise RequestError(
            f"position {low if low < 0 else high} is not from 0 to {context - 1}; raise --ctx-size", "positions"
        )
    return positions.astype(np.int32)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if a field has a wrong type or is out of range."""
    converted(SamplingParams, vars(params))
    for item in PARAMETERS:
        value, kind = getattr(params, item.name), item.metadata["kind"]
        if value is not None and kind in (int, float):
            _range(item.name, value, item.metadata["low"], item.metadata["high"], WORDS[kind.__name__])
    if params.min_tokens > params.max_tokens:
        message = f"min_tokens ({params.min_tokens}) is more than max_tokens ({params.max_tokens}); lower it"
        raise RequestError(message, "min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _range(name, getattr(params, name), 0, min(MAX_LOGPROBS, vocab_size))
    _most("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS, "a list of at most {} token ids")
    _most("logit_bias", params.logit_bias, MAX_LOGIT_BIAS, "a map of at most {} token ids to numbers")
    _most("dry_sequence_breakers", params.dry_sequence_breakers, MAX_BREAKERS, "a list of at most {} strings")
    _most("samplers", params.samplers or (), MAX_SAMPLERS, "a list of at most {} strings")
    for token in params.stop_token_ids:
        _range("stop_token_ids", token, 0, vocab_size - 1)
    for token, bias in params.logit_bias.items():
        _range("logit_bias", token, 0, vocab_size - 1)
        _range("logit_bias", bias, -100, 100, WORDS["float"])
    check_breakers(params.dry_sequence_breakers)
    for name in params.samplers or ():
        if name not in SAMPLERS:
            known = ", ".join(SAMPLERS)
            raise RequestError(f"samplers has an unknown name {name[:40]!r}; known are {known}", "samplers")


def check_breakers(breakers: Sequence[str]) -> list[bytes]:
    """Returns the breakers as UTF-8. Raises RequestError if they are too many, too long, empty or not Unicode."""
    if len(breakers) > MAX_BREAKERS:
        raise RequestError(f"{BREAKERS} has {len(breakers)} strings, more than {MAX_BREAKERS}; give fewer", BREAKERS)
    try:
        encoded = [breaker.encode() for breaker in breakers]
    except UnicodeEncodeError:
        raise RequestError(f"{BREAKERS} has a string that is not valid Unicode", BREAKERS) from None
    for breaker in encoded:
        if not 1 <= len(breaker) <= MAX_BREAKER_BYTES:
            raise RequestError(
                f"{BREAKERS} has a string of {len(breaker)} bytes; each must have 1 to {MAX_BREAKER_BYTES}", BREAKERS
            )
    total = sum(map(len, encoded))
    if total > MAX_ALL_BREAKER_BYTES:
        raise RequestError(
            f"{BREAKERS} has {total} bytes in all, more than {MAX_ALL_BREAKER_BYTES}; give fewer or shorter strings",
            BREAKERS,
        )
    return encoded


def _range(name: str, value: float, low: float, high: float, kind: str = WORDS["int"]) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} must be {kind} from {low} to {high}, not {str(value)[:40]}", name)


def _most(name: str, values: Sized, most: int, words: str) -> None:
    if len(values) > most:
        raise RequestError(f"{name} must be {words.format(most)}", name)
