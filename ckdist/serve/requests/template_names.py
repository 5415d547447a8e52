"""The variables of a chat template that no client and no flag may set."""

from collections.abc import Iterable

RESERVED = frozenset(
    ["messages", "tools", "template", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"]
)


def reserved_variable(names: Iterable[str]) -> str | None:
    """Returns the first of `names` that is reserved or no name of a variable, or None."""
    return next((name for name in names if name in RESERVED or not name.isidentifier() or name.startswith("_")), None)
