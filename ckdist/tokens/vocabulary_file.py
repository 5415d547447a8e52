"""The file of a folder that holds its tokenizer's vocabulary."""

from pathlib import Path

RANKS = "tiktoken.model"  # tiktoken's own format, used by Kimi-K2
MAX_TOKENIZER_BYTES = 256 << 20


def vocabulary_file(folder: Path) -> Path:
    """The file with the vocabulary in `folder`: tokenizer.json, or tiktoken.model if that alone exists."""
    whole = folder / "tokenizer.json"
    return folder / RANKS if not whole.exists() and (folder / RANKS).exists() else whole
