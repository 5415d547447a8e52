"""Chats and texts longer than max_length: how many are truncated, and how many of their tokens are never learned."""

from dataclasses import dataclass

import numpy as np

from ckdist.errors import ConfigError
from ckdist.train.data.token_cache import TokenCache

BLOCK = 512  # documents that are counted at once; bounds memory


@dataclass
class Truncation:
    """Counts over documents. A document is a chat if some of its tokens are not learned."""

    chats: int = 0
    truncated: int = 0  # chats that are longer than max_length
    unlearned: int = 0  # chats that keep no learned token
    answers: int = 0  # learned tokens of chats
    lost: int = 0  # of those, the ones beyond max_length
    texts: int = 0
    divided: int = 0  # texts that are longer than max_length: each part attends to itself alone
    targets: int = 0  # tokens with a loss, of chats and texts
    first: int = -1  # first chat that is truncated, as a document of the cache
    longest: int = 0  # tokens of the longest chat


def count_truncated(cache: TokenCache, documents: np.ndarray, length: int) -> Truncation:
    """Counts over `documents`, (documents,), in rows of `length` tokens."""
    counts = Truncation()
    for first in range(0, len(documents), BLOCK):
        _add_block(counts, cache, documents[first : first + BLOCK], length)
    return counts


def _add_block(counts: Truncation, cache: TokenCache, block: np.ndarray, length: int) -> None:
    """Adds the documents of `block`."""
    begins, ends = cache.starts[block], cache.starts[block + 1]
    sizes = ends - begins
    # The first token of a document is never a target. The one after a row's end still is.
    within = np.minimum(begins + length + 1, ends)
    if cache.learned is None:
        all_learned = np.ones(len(block), bool)
        learned = kept = sizes - 1
    else:
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        flags = np.concatenate([cache.learned[begin:end] for begin, end in pairs])
        sums = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
        last = np.cumsum(sizes)
        first = last - sizes
        kept = sums[first + within - begins] - sums[first + 1]
        learned = sums[last] - sums[first + 1]
        all_learned = sums[last] - sums[first] == sizes
    chats = ~all_learned
    truncated = chats & (sizes > length + 1)
    counts.chats += int(chats.sum())
    counts.truncated += int(truncated.sum())
    counts.unlearned += int((chats & (kept == 0)).sum())
    counts.answers += int(learned[chats].sum())
    counts.lost += int((learned - kept)[chats].sum())
    counts.texts += int(all_learned.sum())
    counts.divided += int((all_learned & (sizes > length)).sum())
    counts.targets += int(kept[chats].sum() + np.maximum(sizes - 1, 0)[all_learned].sum())
    if counts.first < 0 and truncated.any():
        counts.first = int(block[truncated][0])
    if chats.any():
        counts.longest = max(counts.longest, int(sizes[chats].max()))


def describe_truncation(counts: Truncation, cache: TokenCache, length: int, name: str) -> list[str]:
    """Returns lines about truncated documents of `name`, train_file or validation_file; none if nothing is truncated.

    Raises ConfigError if no token would be learned, or every answer is truncated away.
    """
    lines = []
    if counts.truncated:
        example = int(cache.starts[counts.first + 1] - cache.starts[counts.first])
        whole = f", all of {counts.unlearned} chats" if counts.unlearned else ""
        lines.append(
            f"{name}: {counts.truncated} of {counts.chats} chats are longer than max_length ({length}) and are "
            f"truncated, as {cache.where(counts.first)} with {example} tokens: {counts.lost} of {counts.answers} "
            f"tokens of answers are lost{whole}; set max_length to {counts.longest} to keep them"
        )
    if counts.chats and counts.unlearned == counts.chats:
        reason = lines[0].partition(": ")[2] if lines else "its templates write none"
        raise ConfigError(f"{name} has no answer left to learn: {reason}")
    if not counts.targets:
        raise ConfigError(f"{name} has no token to learn: every document is a single token; give longer texts")
    return lines
