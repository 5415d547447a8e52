"""Reads the sampling fields of a request to SamplingParams.

Names of other servers are accepted if they mean the same.
"""

import dataclasses
import hashlib
import re
from typing import Any

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.sampling import SamplingParams
from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields, in_range
from ckdist.tokens.chat_input import kind_of
from ckdist.tokens.tokenizer import Tokenizer

MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_BIAS = 100  # OpenAI's; a token with -100 is banned
MAX_BIAS_CHARS = 256  # maximum of a text that gets a bias
MAX_DIGITS = 10
NUMBER = re.compile("-?[0-9]+")
MAX_INTEGER = (1 << 31) - 1
MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 40
RANDOM_SEED = -1  # llama.cpp's and Ollama's
LLAMA_RANDOM_SEED = 0xFFFFFFFF  # the same in requests and answers of llama-server's own API

# Field of SamplingParams -> (all its names in requests, lowest, highest value).
NUMBERS = {
    "temperature": (("temperature",), 0, 100),
    "top_p": (("top_p",), 0, 1),
    "min_p": (("min_p",), 0, 1),
    "typical_p": (("typical_p", "typ_p"), 0, 1),
    "top_n_sigma": (("top_n_sigma", "nsigma"), -1, 1000),
    "repetition_penalty": (("repetition_penalty", "repeat_penalty"), 0.01, 100),
    "presence_penalty": (("presence_penalty",), -100, 100),
    "frequency_penalty": (("frequency_penalty",), -100, 100),
    "xtc_probability": (("xtc_probability",), 0, 1),
    "xtc_threshold": (("xtc_threshold",), 0, 1),
    "dry_multiplier": (("dry_multiplier",), 0, 1000),
    "dry_base": (("dry_base",), 1, 1000),
    "mirostat_tau": (("mirostat_tau",), 0, 100),
    "mirostat_eta": (("mirostat_eta",), 0, 1),
    "dynatemp_range": (("dynatemp_range",), 0, 100),
    "dynatemp_exponent": (("dynatemp_exponent",), 0, 100),
}
INTEGERS = {
    "min_tokens": (("min_tokens",), 0, MAX_INTEGER),
    "dry_allowed_length": (("dry_allowed_length",), 0, MAX_INTEGER),
    "dry_penalty_last_n": (("dry_penalty_last_n",), -1, MAX_INTEGER),
    "mirostat": (("mirostat", "mirostat_mode"), 0, 2),
    "repeat_last_n": (("repeat_last_n",), -1, MAX_INTEGER),
    "min_keep": (("min_keep",), 0, MAX_INTEGER),
}
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


def read_sampling(fields: Fields, tokenizer: Tokenizer, vocab_size: int, defaults: dict[str, Any]) -> SamplingParams:
    """Reads the sampling fields. `defaults`: fields of SamplingParams with other defaults in this kind of request.

    `max_tokens` and the fields about log-probabilities are read elsewhere.
    """
    unset = SamplingParams(**defaults)
    numbers: dict[str, Any] = {
        name: fields.number(names, getattr(unset, name), low, high) for name, (names, low, high) in NUMBERS.items()
    }
    integers: dict[str, Any] = {
        name: fields.integer(names, getattr(unset, name), low, high) for name, (names, low, high) in INTEGERS.items()
    }
    seed = fields.integer("seed", None, -(1 << 63), (1 << 64) - 1)
    return SamplingParams(
        max_tokens=0,
        top_k=max(0, fields.integer("top_k", unset.top_k, -1, MAX_INTEGER)),
        logit_bias=_logit_bias(fields, tokenizer, vocab_size),
        seed=None if seed == RANDOM_SEED else seed,
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size, MAX_STOP_TOKENS),
        ignore_eos=fields.switch("ignore_eos"),
        dry_sequence_breakers=_breakers(fields, unset.dry_sequence_breakers),
        samplers=_samplers(fields, unset.samplers),
        **numbers,
        **integers,
    )


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


def _logit_bias(fields: Fields, tokenizer: Tokenizer, vocab_size: int) -> dict[int, float]:
    """Reads OpenAI's map or llama-server's list of pairs. A key is a token, or a text whose tokens all get the bias."""
    given = fields.value("logit_bias", dict, list) or {}
    if len(given) > MAX_BIASES:
        raise _bad_bias(f"has {len(given)} tokens; at most {MAX_BIASES} are allowed")
    pairs = given.items() if isinstance(given, dict) else [_pair(item) for item in given]
    biases: dict[int, float] = {}
    for key, bias in pairs:
        value = _bias(bias)
        for token in _biased(key, tokenizer, vocab_size, may_be_number=isinstance(given, dict)):
            biases[token] = value
    if len(biases) > MAX_BIASES:
        raise _bad_bias(f"names {len(biases)} tokens; at most {MAX_BIASES} are allowed")
    return biases


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise _bad_bias("as a list must hold pairs [token, bias]")
    return item[0], item[1]


def _biased(key: Any, tokenizer: Tokenizer, vocab_size: int, may_be_number: bool) -> list[int]:
    tokens = [key]
    if isinstance(key, str):
        if may_be_number and NUMBER.fullmatch(key):
            tokens = [int(key) if len(key) <= MAX_DIGITS else -1]
        elif len(key) <= MAX_BIAS_CHARS:
            tokens = tokenizer.encode(key, add_special=False)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            shown = repr(key[:20]) if isinstance(key, str) else key if type(key) in (int, float) else kind_of(key)
            raise _bad_bias(f"has a key ({shown}) that is not a token from 0 to {vocab_size - 1}")
    return tokens


def _bias(bias: Any) -> float:
    if bias is False:
        return float(-MAX_BIAS)
    if type(bias) not in (int, float):
        raise _bad_bias(f"must map tokens to numbers, or to false, not to {kind_of(bias)}")
    return float(in_range(bias, "logit_bias", -MAX_BIAS, MAX_BIAS))


def _bad_bias(message: str) -> RequestError:
    return RequestError(f"logit_bias {message}", "logit_bias", "invalid_value")


def _breakers(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    given = fields.value("dry_sequence_breakers", list)
    if given is None:
        return default
    if len(given) > MAX_BREAKERS or not all(
        isinstance(x, str) and 1 <= len(x.encode()) <= MAX_BREAKER_BYTES for x in given
    ):
        message = f"must be a list of at most {MAX_BREAKERS} strings of 1 to {MAX_BREAKER_BYTES} bytes"
        raise RequestError(f"dry_sequence_breakers {message}", "dry_sequence_breakers", "invalid_value")
    return tuple(given)


def _samplers(fields: Fields, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Reads llama-server's chain: a list of names, or a string of letters."""
    given = fields.value("samplers", list, str)
    if given is None:
        return default
    if not given:
        raise RequestError("samplers is empty; name one at least, or leave it out", "samplers", "unsupported_value")
    names = []
    for item in given:
        name = CANONICAL_SAMPLERS.get(item) if isinstance(item, str) else None
        if name is None:
            shown = repr(item[:32]) if isinstance(item, str) else kind_of(item)
            message = f"samplers has one ({shown}) that is not among {', '.join(SAMPLERS)}"
            raise RequestError(message, "samplers", "unsupported_value")
        names.append(name)
    return tuple(names)
