"""Explains the selected instruction set level: the reason, and the CPU flags that the next better level needs."""

import os

from ckdist import native


def next_better() -> tuple[str, str]:
    """(next level above the best of this CPU, CPU flags that it lacks); empty strings if the CPU has the top level."""
    above = ("", "")
    for name, lacks in native.isas().items():
        if not lacks:
            break
        above = (name, lacks)
    return above


def reason() -> str:
    """The reason for the selected level: CKDIST_ISA, this CPU, or the other ranks; and the flags of the next one."""
    name, lacks = next_better()
    chosen = native.isa()
    if os.environ.get("CKDIST_ISA") == chosen:
        why = "chosen by CKDIST_ISA"
    elif chosen == next(n for n, missing in native.isas().items() if not missing):
        why = "the best of this CPU"
    else:
        why = "the best that all ranks have"
    return why + (f"; {name} needs {lacks}" if name else "")
