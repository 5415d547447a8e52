"""Imports modules whose objects stay."""

import gc
import importlib
from types import ModuleType


def frozen_import(name: str) -> ModuleType:
    """Imports a module and freezes its objects: the garbage collector never scans them."""
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return module
