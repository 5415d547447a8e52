"""The use of cached blocks by one request, for its line in the log."""

from dataclasses import dataclass


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
