"""Python imports this at the start of processes that tests start.

Their ranks poll as seldom as those in tests. Tests start them more than a thousand times, so they start faster: garbage
is collected seldom, numpy's functions get no docstrings, and methods of dataclasses are compiled once for all.
"""

import builtins
import contextlib
import gc
import marshal
import os
import sys
import types
from importlib.machinery import PathFinder

POLLS = 50  # of a flag before a thread sleeps; a thread that polls for long takes the core of another test
ARITHMETIC_SECONDS = 0.002  # of a measurement of the CPU; every rank of a training makes five
READ_BYTES = 16 << 20  # of a measurement of memory; every rank of `ckdist bench` makes one, 256 MiB for each thread
PREFILL_SECONDS = 0.2  # of a measurement of both forms of prefill
DOCTOR_SECONDS = 0.6  # of all measurements of `ckdist doctor`
DOCSTRINGS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../build/tests")


class Methods:
    """The code of the methods that `dataclasses` writes as text. A start compiles 500 of
    them, in a tenth of its time.

    Processes share it by a file. One that has compiled many texts writes the file again.
    """

    FILE = os.path.join(FOLDER, f"dataclasses-{sys.implementation.cache_tag}.marshal")
    MANY, MOST = 50, 5000

    def __init__(self):
        self.codes, self.added = {}, 0  # text -> the code as marshal writes it
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError), open(self.FILE, "rb") as file:
            self.codes = marshal.loads(file.read())

    def execute(self, text, scope, names):
        stored = self.codes.get(text)
        code = compile(text, "<string>", "exec") if stored is None else marshal.loads(stored)
        if stored is None:
            self.codes[text] = marshal.dumps(code)
            self.added += 1
            if self.added % self.MANY == 0:
                self.save()
        builtins.exec(code, scope, names)

    def save(self):
        if len(self.codes) > self.MOST:
            self.codes.clear()
        with contextlib.suppress(OSError):
            os.makedirs(FOLDER, exist_ok=True)
            own = f"{self.FILE}.{os.getpid()}"
            with open(own, "wb") as file:
                file.write(marshal.dumps(self.codes))
            os.replace(own, self.FILE)


# Module -> its names that are set after the import, and what gives the values.
NAMES = {
    "ckdist.cli.doctor": {"MEASURE_SECONDS": lambda: DOCTOR_SECONDS},
    "ckdist.engine.prefill_measurement": {"SECONDS": lambda: PREFILL_SECONDS},
    "ckdist.layouts.rank_plan": {"SPINS": lambda: POLLS},
    "ckdist.comm.communicator": {"_PATIENT_POLLS": lambda: POLLS},
    "ckdist.topology.arithmetic": {"ARITHMETIC_SECONDS": lambda: ARITHMETIC_SECONDS},
    "ckdist.topology.bandwidth": {"READ_BYTES": lambda: READ_BYTES},
    "dataclasses": {"exec": lambda: Methods().execute},
}


class SetNames:
    """Sets names of a module after it was imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in NAMES else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_set(module):
            execute(module)
            for attribute, value in NAMES[name].items():
                setattr(module, attribute, value())

        spec.loader.exec_module = execute_and_set
        return spec


sys.meta_path.insert(0, SetNames)
sys.modules.update((name, types.ModuleType(name)) for name in DOCSTRINGS)
gc.set_threshold(20_000)
