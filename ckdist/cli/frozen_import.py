"""Less work for the garbage collector: modules and models stay."""

import contextlib
import gc
import importlib
from collections.abc import Iterator
from types import ModuleType


def frozen_import(name: str) -> ModuleType:
    """Imports a module and freezes its objects: the garbage collector never scans them."""
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return module


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pauses the garbage collector while programs are lowered: hardly any of their many objects are garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
