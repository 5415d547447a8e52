"""Python imports this at the start of processes that tests start: their ranks poll as seldom as those in tests."""

import sys
from importlib.machinery import PathFinder

POLLS = 50  # of a flag before a thread sleeps; a thread that polls for long takes the core of another test
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
