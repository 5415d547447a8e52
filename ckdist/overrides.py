"""GGUF metadata that the command line overrides: `--override-kv KEY=TYPE:VALUE`, as in llama-server."""

import csv
import math
from collections.abc import Iterable

from ckdist.errors import ConfigError

FLAG = "--override-kv"
_TRUTH = {"true": True, "false": False}
_READERS = {"int": int, "float": float, "bool": _TRUTH.__getitem__, "str": str}


def metadata_overrides(arguments: Iterable[str]) -> dict[str, int | float | bool | str]:
    """Parses arguments like `llama.rope.freq_base=float:1e6,tokenizer.ggml.pre=str:qwen2` into key -> value.

    The last value of a key counts. A value with a comma must be in double quotes, together with its key. Raises
    ConfigError for an argument that is not of this form.
    """
    overrides = {}
    for argument in arguments:
        try:
            items = next(csv.reader([argument], strict=True), [])
        except csv.Error as error:
            raise ConfigError(f"{FLAG} ({argument!r:.80}) has quotes that do not match: {error}") from None
        for item in items or [""]:
            key, equals, typed = item.partition("=")
            kind, colon, text = typed.partition(":")
            if not (key and equals and colon):
                raise ConfigError(
                    f"{FLAG} ({item!r:.80}) is not KEY=TYPE:VALUE; write for example tokenizer.ggml.pre=str:qwen2"
                )
            if kind not in _READERS:
                raise ConfigError(f"{FLAG} ({item!r:.80}) has type {kind!r:.20}; the types are {', '.join(_READERS)}")
            try:
                overrides[key] = _READERS[kind](text)
            except (ValueError, KeyError):
                known = "true or false" if kind == "bool" else "a whole number" if kind == "int" else "a number"
                raise ConfigError(f"{FLAG} {key} is {text!r:.40}, not {known}") from None
            if kind == "float" and not math.isfinite(overrides[key]):
                raise ConfigError(f"{FLAG} {key} is {text!r:.40}, not a finite number")
    return overrides
