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
    """Why the chosen level is the one: CKDIST_ISA, the CPU, or another rank's; and what the next better one needs."""
    name, lacks = next_better()
    chosen = native.isa()
    if os.environ.get("CKDIST_ISA") == chosen:
        why = "chosen by CKDIST_ISA"
    elif chosen == next(n for n, missing in native.isas().items() if not missing):
        why = "the best of this CPU"
    else:
        why = "the best that all ranks have"
    return why + (f"; {name} needs {lacks}" if name else "")
