"""Python imports this at the start of processes that tests start.

Their ranks poll as seldom as those in tests. Tests start them more than a thousand times, so they start faster: garbage
is collected seldom, and numpy's functions get no docstrings.
"""

import gc
import sys
import types
from importlib.machinery import PathFinder

POLLS = 50  # of a flag before a thread sleeps; a thread that polls for long takes the core of another test
DOCSTRINGS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
NAMES = {"ckdist.layouts.rank_plan": "SPINS", "ckdist.comm.communicator": "_PATIENT_POLLS"}


class FewPolls:
    """Sets the number after its module was imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in NAMES else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_set(module):
            execute(module)
            setattr(module, NAMES[name], POLLS)

        spec.loader.exec_module = execute_and_set
        return spec


sys.meta_path.insert(0, FewPolls)
sys.modules.update((name, types.ModuleType(name)) for name in DOCSTRINGS)
gc.set_threshold(20_000)
