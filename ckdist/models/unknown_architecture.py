"""The error for an architecture that is not known: it names the nearest ones, and the fields that these do not read."""

import difflib
from collections.abc import Callable, Mapping

from ckdist.errors import ArchitectureError, CkdistError
from ckdist.models.families.family import Family

_SHOWN = 3
_MISSING = {  # beginning of a name, as `_stem` returns it -> the part that ckdist does not have
    "deepseekv41": "caches that layers share and tables of n-grams",
    "inkling": "scores by distance that depend on the query, and short convolutions after projections",
    "mistrallarge4": "learned rotations, learned scales of queries and latent caches that layers share",
}


def _stem(name: str) -> str:
    """The part of a name in which architectures differ, in lower case."""
    return name.partition("For")[0].lower().replace("_", "")


def unknown_architecture(
    name: str, known: Mapping[str, Family], where: str, read: Callable[[Family], list[str]] | None
) -> ArchitectureError:
    """Returns the error for the architecture `name`.

    Args:
        name: The architecture.
        known: Known names, and their families.
        where: Beginning of the message.
        read: Returns the fields of the file that a family does not have.
    """
    by_stem: dict[str, str] = {}
    for other in known:
        by_stem.setdefault(_stem(other), other)
    nearest = [by_stem[stem] for stem in difflib.get_close_matches(_stem(name), by_stem, _SHOWN)]
    said = f"{where}: architecture {name[:100]!r} is not known"
    if part := next((part for stem, part in _MISSING.items() if _stem(name).startswith(stem)), None):
        said += f": ckdist does not have {part}"
    if not nearest:
        return ArchitectureError(f"{said}, and no known one has a similar name; docs/families.md lists them all")
    said += f"; the nearest known {'are' if len(nearest) > 1 else 'is'} {', '.join(nearest)}"
    try:
        fields = read(known[nearest[0]]) if read else []
    except CkdistError as error:
        return ArchitectureError(f"{said}; {nearest[0]} cannot read the file: {str(error).removeprefix(f'{where}: ')}")
    if fields:
        said += f"; {nearest[0]} does not have these fields: {', '.join(fields)[:300]}"
    return ArchitectureError(said)
