"""The tokenizer that comes with a model, whichever kind of model it is."""

from collections.abc import Mapping
from pathlib import Path

from ckdist.tokens.folder import load_tokenizer
from ckdist.tokens.tokenizer import Tokenizer


def tokenizer_of(model: str | Path, overrides: Mapping[str, int | float | bool | str] | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file, with `overrides` put over its metadata, or of a folder.

    Raises ModelFileError where there is none that can be read.
    """
    if Path(model).is_dir():
        return load_tokenizer(model)
    from ckdist.tokens.gguf import tokenizer_from_gguf  # a process for a folder's tokenizer needs no numpy
    from ckdist.weights.gguf import read_gguf

    return tokenizer_from_gguf(read_gguf(Path(model), overrides).metadata)
