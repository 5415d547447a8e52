"""A request as it arrives, with every field checked. This module neither tokenises nor queues."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

from ckdist.config.samplers import MAX_BREAKERS, SAMPLERS
from ckdist.engine.block_pool import ONE_TENANT
from ckdist.engine.dry_breakers import check_breakers
from ckdist.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, PARAMETERS, SamplingParams
from ckdist.errors import RequestError

MAX_ID_CHARS = 200
MAX_TENANT_BYTES = 64
MAX_SAMPLERS = 32

Tokens: TypeAlias = Sequence[int] | np.ndarray  # token ids, (tokens,)


@dataclass(frozen=True)
class Request:
    """A parsed `submit` message. The engine's `add` checks it against the model's vocabulary and context."""

    id: str
    prompt: np.ndarray  # int32 (tokens,)
    tenant: bytes | None  # None: it neither reuses cached blocks nor leaves any
    params: SamplingParams


@dataclass(frozen=True)
class EmbedRequest:
    """A parsed `embed` message, checked as far as a `Request`."""

    id: str
    prompt: np.ndarray  # int32 (tokens,)
    tenant: bytes | None
    pooling: str
    first_text: int  # tokens of the first text if the prompt has two, else 0


def parse_embed(message: Mapping[str, Any]) -> EmbedRequest:
    """Parses an `embed` message. Raises RequestError that names the field."""
    key, prompt, tenant = _common_fields(message)
    pooling = message.get("pooling")
    if not isinstance(pooling, str):
        raise RequestError("pooling must be a string", "pooling")
    first_text = message.get("first_text", 0)
    _integer("first_text", first_text, 0, len(prompt))
    return EmbedRequest(key, prompt, tenant, pooling, first_text)


def _common_fields(message: Mapping[str, Any]) -> tuple[str, np.ndarray, bytes | None]:
    """Returns id, prompt and tenant."""
    key, prompt, tenant = message.get("id"), message.get("prompt"), message.get("tenant", ONE_TENANT)
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_ID_CHARS:
        raise RequestError(f"id must be a string of 1 to {MAX_ID_CHARS} characters", "id")
    if not isinstance(prompt, bytes) or len(prompt) % 4:
        raise RequestError("prompt must be token ids as int32 bytes", "prompt")
    if tenant is not None and not (isinstance(tenant, bytes) and len(tenant) <= MAX_TENANT_BYTES):
        raise RequestError(f"tenant must be at most {MAX_TENANT_BYTES} bytes, or null", "tenant")
    return key, np.frombuffer(prompt, "<i4"), tenant


def parse_submit(message: Mapping[str, Any]) -> Request:
    """Parses a `submit` message. Raises RequestError that names the field."""
    key, prompt, tenant = _common_fields(message)
    sampling = message.get("sampling", {})
    if not isinstance(sampling, dict):
        raise RequestError("sampling must be a map", "sampling")
    known = {field.name for field in fields(SamplingParams)}
    for name in sampling:
        if name not in known:
            raise RequestError(
                f"unknown sampling field {str(name)[:100]!r}; the known ones are {', '.join(sorted(known))}", "sampling"
            )
    for name in ("stop_token_ids", "dry_sequence_breakers", "samplers"):
        if isinstance(sampling.get(name), list):
            sampling = {**sampling, name: tuple(sampling[name])}
    return Request(key, prompt, tenant, SamplingParams(**sampling))


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


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if a field has a wrong type or is out of range."""
    for item in PARAMETERS:
        _check_parameter(item, getattr(params, item.name))
    if params.min_tokens > params.max_tokens:
        message = f"min_tokens ({params.min_tokens}) is more than max_tokens ({params.max_tokens}); lower it"
        raise RequestError(message, "min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _integer(name, getattr(params, name), 0, min(MAX_LOGPROBS, vocab_size))
    if not isinstance(params.stop_token_ids, (tuple, list)) or len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(f"stop_token_ids must be a list of at most {MAX_STOP_TOKENS} token ids", "stop_token_ids")
    for token in params.stop_token_ids:
        _integer("stop_token_ids", token, 0, vocab_size - 1)
    if not isinstance(params.logit_bias, dict) or len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias must be a map of at most {MAX_LOGIT_BIAS} token ids to numbers", "logit_bias")
    for token, bias in params.logit_bias.items():
        _integer("logit_bias", token, 0, vocab_size - 1)
        _number("logit_bias", bias, -100, 100)
    _strings("dry_sequence_breakers", params.dry_sequence_breakers, MAX_BREAKERS)
    check_breakers(params.dry_sequence_breakers)
    if params.grammar is not None and not isinstance(params.grammar, str):
        raise RequestError("grammar must be a string", "grammar")
    if params.samplers is not None:
        _strings("samplers", params.samplers, MAX_SAMPLERS)
        for name in params.samplers:
            if name not in SAMPLERS:
                known = ", ".join(SAMPLERS)
                raise RequestError(f"samplers has an unknown name {name[:40]!r}; known are {known}", "samplers")


def _check_parameter(item: Field[Any], value: object) -> None:
    kind, low, high = item.metadata["kind"], item.metadata["low"], item.metadata["high"]
    if value is None and item.default is None:
        return
    if kind is bool and not isinstance(value, bool):
        raise RequestError(f"{item.name} must be true or false", item.name)
    if kind is int:
        _integer(item.name, value, low, high)
    if kind is float:
        _number(item.name, value, low, high)


def _strings(name: str, value: object, most: int) -> None:
    if not isinstance(value, (tuple, list)) or len(value) > most or not all(isinstance(part, str) for part in value):
        raise RequestError(f"{name} must be a list of at most {most} strings", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, not {str(value)[:40]}", name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if (type(value) is not int and type(value) is not float) or not isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {str(value)[:40]}", name)
