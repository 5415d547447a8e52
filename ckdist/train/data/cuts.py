"""What `max_length` leaves of chats and texts: how many are cut, and how many of their tokens are never learned."""

from dataclasses import dataclass

import numpy as np

from ckdist.errors import ConfigError
from ckdist.train.data.cache import TokenCache

BLOCK = 512  # documents that are counted at once, which bounds memory


@dataclass
class Cuts:
    """Counts over documents. A document is a chat if some of its tokens are not learned."""

    chats: int = 0
    cut: int = 0  # chats that are longer than max_length
    unlearned: int = 0  # chats that keep no learned token
    answers: int = 0  # learned tokens of chats
    lost: int = 0  # of those, the ones behind max_length
    texts: int = 0
    divided: int = 0  # texts that are longer than max_length: each part attends to itself alone
    targets: int = 0  # tokens with a loss, of chats and texts
    first: int = -1  # first chat that is cut, as a document of the cache
    longest: int = 0  # tokens of the longest chat


def count_cuts(cache: TokenCache, documents: np.ndarray, length: int) -> Cuts:
    """Counts over `documents`, (documents,) in ascending order, in rows of `length` tokens."""
    cuts = Cuts()
    for first in range(0, len(documents), BLOCK):
        block = documents[first : first + BLOCK]
        begins, ends = cache.starts[block], cache.starts[block + 1]
        _add_block(cuts, cache, block, begins, ends, length)
    return cuts


def _add_block(
    cuts: Cuts, cache: TokenCache, block: np.ndarray, begins: np.ndarray, ends: np.ndarray, length: int
) -> None:
    """Adds the documents of `block`, whose tokens are [begins, ends)."""
    sizes = ends - begins
    # The first token of a document is never a target; the one behind a row's end still is.
    within = np.minimum(begins + length + 1, ends)
    if cache.learned is None:
        all_learned = np.ones(len(block), bool)
        learned = kept = sizes - 1
    else:
        edge = begins[0]  # documents ascend
        sums = np.concatenate([[0], np.cumsum(cache.learned[edge : ends[-1]], dtype=np.int64)])
        until = lambda places: sums[places - edge]
        kept = until(within) - until(begins + 1)
        learned = until(ends) - until(begins + 1)
        all_learned = until(ends) - until(begins) == sizes
    chats = ~all_learned
    cut = chats & (sizes > length)
    cuts.chats += int(chats.sum())
    cuts.cut += int(cut.sum())
    cuts.unlearned += int((chats & (kept == 0)).sum())
    cuts.answers += int(learned[chats].sum())
    cuts.lost += int((learned - kept)[chats].sum())
    cuts.texts += int(all_learned.sum())
    cuts.divided += int((all_learned & (sizes > length)).sum())
    cuts.targets += int(kept[chats].sum() + np.maximum(sizes - 1, 0)[all_learned].sum())
    if cuts.first < 0 and cut.any():
        cuts.first = int(block[cut][0])
    if chats.any():
        cuts.longest = max(cuts.longest, int(sizes[chats].max()))


def describe_cuts(cuts: Cuts, cache: TokenCache, length: int, name: str) -> list[str]:
    """Lines about what is cut; none if nothing is. `name`: of the data, train_file or validation_file.

    ConfigError if no token would be learned, or every answer was cut off.
    """
    lines = []
    if cuts.cut:
        example = int(cache.starts[cuts.first + 1] - cache.starts[cuts.first])
        lines.append(
            f"{name}: {cuts.cut} of {cuts.chats} chats are longer than max_length ({length}) and are cut, as "
            f"{cache.where(cuts.first)} with {example} tokens: {cuts.lost} of {cuts.answers} tokens of answers are "
            f"lost{f', all of {cuts.unlearned} chats' if cuts.unlearned else ''}; set max_length to {cuts.longest} to keep them"
        )
    if cuts.chats and cuts.unlearned == cuts.chats:
        raise ConfigError(
            f"{name} has no answer left to learn: {lines[0].partition(': ')[2]}" if lines else _nothing(name)
        )
    if not cuts.targets:
        raise ConfigError(_nothing(name))
    return lines


def _nothing(name: str) -> str:
    return f"{name} has no token to learn: every document is a single token; give longer texts"
