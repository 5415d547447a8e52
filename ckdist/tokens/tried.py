"""Tokenizers that a process may use itself, because they have passed `probe` in a process with limits.

A digest of a folder's files in the user's cache records that they have passed.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from ckdist import __version__
from ckdist.comm.user_cache import cache_path
from ckdist.regular_file import read_regular
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.vocabulary_file import MAX_TOKENIZER_BYTES, vocabulary_file

BESIDE = ("tokenizer_config.json", "config.json", "generation_config.json")  # read besides the vocabulary's file


def load_tried(model: str | Path, overrides: Mapping[str, int | float | bool | str] | None = None) -> Tokenizer:
    """A tokenizer for use in this process, after it has passed `probe` in a process with limits, now or earlier.

    Raises ModelFileError if it does not pass.
    """
    folder = Path(model)
    if folder.is_dir() and not was_tried(folder):  # a GGUF file has neither patterns nor normalisers of its own
        from ckdist.tokens.confined import load_vocabulary

        load_vocabulary(folder)
        remember(folder)
    return tokenizer_of(model, overrides)


def was_tried(folder: Path) -> bool:
    """True if a tokenizer of the same files has passed with these versions of the software."""
    with contextlib.suppress(OSError):
        return _mark(folder).exists()
    return False


def remember(folder: Path) -> None:
    """Records that the tokenizer of `folder` has passed."""
    with contextlib.suppress(OSError):  # a cache that cannot be written is not used
        mark = _mark(folder, writing=True)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(folder: Path, writing: bool = False) -> Path:
    """The empty file that records it. Raises OSError if files cannot be read or are too large."""
    digest = hashlib.sha256(f"{__version__} {tokenizers.__version__}".encode())
    for path in (vocabulary_file(folder), *(folder / name for name in BESIDE)):
        data = read_regular(path, MAX_TOKENIZER_BYTES) if path.exists() else b""
        digest.update(f"\n{path.name} {len(data)}\n".encode())
        digest.update(data)
    return cache_path(f"tokenizers/{digest.hexdigest()}", writing)
