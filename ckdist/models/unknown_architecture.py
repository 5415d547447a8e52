"""The error for an architecture that is not known: it names the nearest ones, and the fields that these do not read."""

import difflib
from collections.abc import Iterable

from ckdist.errors import ArchitectureError

_SHOWN = 3


def _stem(name: str) -> str:
    """The part of a name in which architectures differ, in lower case."""
    return name.partition("For")[0].lower().replace("_", "")


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that are similar to `name`, the most similar first."""
    by_stem: dict[str, str] = {}
    for other in known:
        by_stem.setdefault(_stem(other), other)
    return [by_stem[stem] for stem in difflib.get_close_matches(_stem(name), by_stem, _SHOWN)]


def unknown_architecture(name: str, nearest: list[str], lacks: str, where: str) -> ArchitectureError:
    """Returns the error.

    Args:
        name: The architecture.
        nearest: Similar names that are known.
        lacks: Why the family of the first of them cannot read the model, or "".
        where: Beginning of the message.
    """
    said = f"{where}: architecture {name[:100]!r} is not known"
    if not nearest:
        return ArchitectureError(f"{said}, and no known one has a similar name; docs/formats.md lists them all")
    said += f"; the nearest known {'are' if len(nearest) > 1 else 'is'} {', '.join(nearest)}"
    return ArchitectureError(f"{said}; {nearest[0]} {lacks:.300}" if lacks else said)
