"""The use of cached blocks by one request, for its line in the log."""

from dataclasses import dataclass

from ckdist.program.step_batch import BLOCK_TOKENS


@dataclass(slots=True)
class CacheUse:
    """Tokens of a prompt that were not computed, and the reason why no more of them were found.

    Attributes:
        matched: Tokens that were in memory.
        loaded: Tokens that were read from disk.
        loaded_bytes: Bytes read for them, on all ranks.
        load_seconds: Seconds from the beginning of the load to its end.
        end: Why the prefix ended there, in a word or two.
        has_loaded: A load for it has ended, and there is no second one.
    """

    matched: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    end: str = ""
    has_loaded: bool = False


def match_end(is_cached: bool, known: int, used: int, limit: int) -> str:
    """Why a match in memory ended.

    Args:
        is_cached: The request uses the cache.
        known: Blocks that were found.
        used: Blocks that it can begin with; fewer if a state is missing.
        limit: Tokens that may be reused.
    """
    if not is_cached:
        return "not cached"
    if used < known:
        return "no state"
    return "whole prompt" if (known + 1) * BLOCK_TOKENS > limit else "new tokens"
