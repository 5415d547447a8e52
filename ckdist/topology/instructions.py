"""The levels of instructions that kernels come in: which was chosen, why, and what the CPU lacks for the next better
one.
"""

import os

from ckdist import native


def next_better() -> tuple[str, str]:
    """The level above the best that this CPU has, and the CPU flags that it lacks; empty where it has the best of
    all.
    """
    above = ("", "")
    for name, lacks in native.isas().items():
        if not lacks:
            break
        above = (name, lacks)
    return above


def reason() -> str:
    """Why the chosen level is the one: CKDIST_ISA, or the CPU; and what the next better one needs."""
    name, lacks = next_better()
    why = "chosen by CKDIST_ISA" if "CKDIST_ISA" in os.environ else "the best of this CPU"
    return why + (f"; {name} needs {lacks}" if name else "")
