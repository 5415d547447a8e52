"""Reads the sampling fields of a request to SamplingParams.

Names of other servers are accepted if they mean the same.
"""

import dataclasses
import hashlib
import re
from typing import TYPE_CHECKING, Any

from ckdist.config.samplers import MAX_BREAKER_BYTES, MAX_BREAKERS, SAMPLERS
from ckdist.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, PARAMETERS, SamplingParams
from ckdist.serve.requests.request_fields import Fields, in_range, wrong
from ckdist.tokens.chat_input import kind_of

if TYPE_CHECKING:  # the HTTP process has no tokenizer
    from ckdist.tokens.tokenizer import Tokenizer

MAX_BIAS = 100  # OpenAI's; a token with -100 is banned
MAX_BIAS_CHARS = 256  # maximum of a text that gets a bias
MAX_DIGITS = 10
NUMBER = re.compile("-?[0-9]+")
RANDOM_SEED = -1  # llama.cpp's and Ollama's
LLAMA_RANDOM_SEED = 0xFFFFFFFF  # the same in requests and answers of llama-server's own API
LLAMA_DEFAULTS = {  # of llama-server's own API
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
    "samplers": SAMPLERS,
}

# The numbers among the sampling fields. `max_tokens` is read with the other limits of an answer.
NUMBERS = tuple(item for item in PARAMETERS if item.metadata["kind"] in (int, float) and item.name != "max_tokens")
# Other names of samplers. The first is the letter in a chain that is written as a string.
ALIASES = {
    "penalties": ("e",),
    "dry": ("d",),
    "top_n_sigma": ("s", "top-n-sigma"),
    "top_k": ("k", "top-k"),
    "typ_p": ("y", "typical_p", "typical-p", "typical", "typ-p", "typ"),
    "top_p": ("p", "top-p", "nucleus"),
    "min_p": ("m", "min-p"),
    "xtc": ("x",),
    "temperature": ("t", "temp"),
}
CANONICAL_SAMPLERS = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}


def read_sampling(fields: Fields, tokenizer: "Tokenizer", vocab_size: int, defaults: dict[str, Any]) -> SamplingParams:
    """Reads the sampling fields. `defaults`: fields of SamplingParams with other defaults in this kind of request.

    `max_tokens` and the fields about log-probabilities are read elsewhere.
    """
    unset = SamplingParams(**defaults)
    numbers = {item.name: _number(fields, item, getattr(unset, item.name)) for item in NUMBERS}
    numbers["top_k"] = max(0, numbers["top_k"])
    if numbers["seed"] == RANDOM_SEED:
        numbers["seed"] = None
    return SamplingParams(
        max_tokens=0,
        logit_bias=_logit_bias(fields, tokenizer, vocab_size),
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size, MAX_STOP_TOKENS),
        ignore_eos=fields.switch("ignore_eos"),
        dry_sequence_breakers=_breakers(fields, unset.dry_sequence_breakers),
        samplers=_samplers(fields, unset.samplers),
        **numbers,
    )


def _number(fields: Fields, item: dataclasses.Field[Any], default: Any) -> Any:
    read = fields.integer if item.metadata["kind"] is int else fields.number
    return read((item.name, *item.metadata["also"]), default, item.metadata["low"], item.metadata["high"])


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Returns `sampling` with the seed of choice number `choice`.

    The first choice has the request's own seed. The seeds of others are derived from it.
    """
    if sampling.seed is None:
        return sampling
    seed = sampling.seed & ((1 << 63) - 1)
    if choice:
        digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
    return dataclasses.replace(sampling, seed=seed)


def _logit_bias(fields: Fields, tokenizer: "Tokenizer", vocab_size: int) -> dict[int, float]:
    """Reads OpenAI's map or llama-server's list of pairs. A key is a token, or a text whose tokens all get the bias."""
    given = fields.value("logit_bias", dict, list) or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise wrong("logit_bias", f"has {len(given)} tokens; at most {MAX_LOGIT_BIAS} are allowed")
    pairs = given.items() if isinstance(given, dict) else [_pair(item) for item in given]
    biases: dict[int, float] = {}
    for key, bias in pairs:
        value = _bias(bias)
        for token in _biased(key, tokenizer, vocab_size, may_be_number=isinstance(given, dict)):
            biases[token] = value
    if len(biases) > MAX_LOGIT_BIAS:
        raise wrong("logit_bias", f"names {len(biases)} tokens; at most {MAX_LOGIT_BIAS} are allowed")
    return biases


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise wrong("logit_bias", "as a list must hold pairs [token, bias]")
    return item[0], item[1]


def _biased(key: Any, tokenizer: "Tokenizer", vocab_size: int, may_be_number: bool) -> list[int]:
    tokens = [key]
    if isinstance(key, str):
        if may_be_number and NUMBER.fullmatch(key):
            tokens = [int(key) if len(key) <= MAX_DIGITS else -1]
        elif len(key) <= MAX_BIAS_CHARS:
            tokens = tokenizer.encode(key, add_special=False)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            shown = repr(key[:20]) if isinstance(key, str) else key if type(key) in (int, float) else kind_of(key)
            raise wrong("logit_bias", f"has a key ({shown}) that is not a token from 0 to {vocab_size - 1}")
    return tokens


def _bias(bias: Any) -> float:
    if bias is False:
        return float(-MAX_BIAS)
    if type(bias) not in (int, float):
        raise wrong("logit_bias", f"must map tokens to numbers, or to false, not to {kind_of(bias)}")
    return float(in_range(bias, "logit_bias", -MAX_BIAS, MAX_BIAS))


def _breakers(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    given = fields.value("dry_sequence_breakers", list)
    if given is None:
        return default
    if len(given) > MAX_BREAKERS or not all(
        isinstance(x, str) and 1 <= len(x.encode()) <= MAX_BREAKER_BYTES for x in given
    ):
        text = f"must be a list of at most {MAX_BREAKERS} strings of 1 to {MAX_BREAKER_BYTES} bytes"
        raise wrong("dry_sequence_breakers", text)
    return tuple(given)


def _samplers(fields: Fields, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Reads llama-server's chain: a list of names, or a string of letters."""
    given = fields.value("samplers", list, str)
    if given is None:
        return default
    if not given:
        raise wrong("samplers", "is empty; name one at least, or leave it out", "unsupported_value")
    names = []
    for item in given:
        name = CANONICAL_SAMPLERS.get(item) if isinstance(item, str) else None
        if name is None:
            shown = repr(item[:32]) if isinstance(item, str) else kind_of(item)
            raise wrong("samplers", f"has one ({shown}) that is not among {', '.join(SAMPLERS)}", "unsupported_value")
        names.append(name)
    return tuple(names)
