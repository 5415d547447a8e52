"""`ckdist list`: shows named models with size, licence, and path or the command that fetches them."""

import sys

from ckdist.config.commands import ListCommand
from ckdist.hub.catalogue import CATALOGUE
from ckdist.hub.repository import cached_models
from ckdist.hub.store import Store
from ckdist.terminal import is_terminal, print_table


def rows() -> list[tuple[str, str, str, str]]:
    """Returns (name, size, licence, place) of the catalogue's models, then of models in the Hugging Face cache."""
    store, found = Store(), []
    for model in CATALOGUE.values():
        pull = f"ckdist pull {model.name}" + (" --accept-license" if model.terms else "")
        place = (
            str(store.path(model)) if store.has(model) else f"not here: {pull}, or put the file at {store.path(model)}"
        )
        licence = f"{model.licence} ({model.terms})" if model.terms else model.licence
        found.append((model.name, megabytes(model.bytes), licence, place))
    found += [(name, megabytes(size), "see its repository", path) for name, size, path in cached_models()]
    return found


def megabytes(size: int) -> str:
    """Formats `size` bytes in MB."""
    return f"{size / 1e6:.1f} MB"


def run(_command: ListCommand) -> int:
    """Prints the table. Returns 0."""
    if is_terminal(sys.stdout):
        print_table(("name", "size", "licence", "path"), rows(), right=("size",))
        return 0
    table = [("name", "size", "licence", "path"), *rows()]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join([*(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)), row[3]]))
    return 0
