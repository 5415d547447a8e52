"""Loads the tokenizer of a model of any kind."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_folder import load_tokenizer

CHAT_TEMPLATE = "ckdist.chat_template"  # the key, in `overrides`, of a template in place of the model's


def tokenizer_of(model: str | Path, overrides: Mapping[str, int | float | bool | str] | None = None) -> Tokenizer:
    """Loads the tokenizer of a GGUF file, with `overrides` over its metadata, or of a folder.

    Raises ModelFileError if there is no readable tokenizer.
    """
    others = dict(overrides or {})
    template = others.pop(CHAT_TEMPLATE, None)
    tokenizer = _stored_tokenizer(model, others)
    return tokenizer if template is None else replace(tokenizer, templates={"default": str(template)})


def _stored_tokenizer(model: str | Path, overrides: Mapping[str, int | float | bool | str]) -> Tokenizer:
    if Path(model).is_dir():
        return load_tokenizer(model)
    # Here, because a process for a folder's tokenizer needs no numpy.
    from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
    from ckdist.weights.gguf import read_gguf

    return tokenizer_from_gguf(read_gguf(Path(model), overrides).metadata)
