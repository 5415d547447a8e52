"""Explains the selected instruction set level: the reason, and the CPU flags that the next better level needs."""

import os

from ckdist import native


def reason() -> str:
    """The reason for the selected level: CKDIST_ISA, this CPU, or the other ranks; and the flags of the next one."""
    chosen = native.isa()
    levels = list(native.isas().items())  # best first
    best = next(i for i, (_, lacks) in enumerate(levels) if not lacks)
    if os.environ.get("CKDIST_ISA") == chosen:
        why = "chosen by CKDIST_ISA"
    elif chosen == levels[best][0]:
        why = "the best of this CPU"
    else:
        why = "the best that all ranks have"
    return f"{why}; {' needs '.join(levels[best - 1])}" if best else why
