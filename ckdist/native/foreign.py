"""The type of what cffi hands out."""

from typing import Any, TypeAlias

# A struct, array, pointer or buffer of cffi. Its fields come from the headers at run time, where no checker sees them.
CData: TypeAlias = Any
