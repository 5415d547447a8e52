"""The level of instructions that hosts agree on, and the speed of a machine at a lower level than its own."""

from collections.abc import Iterable
from dataclasses import replace

from ckdist.plan.machine_spec import FORMATS, MachineSpec
from ckdist.weights.dtypes import BY_NAME
from ckdist.weights.packed_type import activation_format

# Level: (the next lower levels of its CPUs, operations of an instruction in products of each of FORMATS, in those of a
# register of 128 bits with float32). A level without 8-bit dot products takes three instructions for one.
_LEVELS = {
    "amx": (("avx512_bf16", "avx2_vnni"), (4, 112, 224)),
    "avx512_bf16": (("avx512_vnni",), (4, 8, 16)),
    "avx512_vnni": (("avx512",), (4, 4, 16)),
    "avx512": (("avx2",), (4, 4, 16 / 3)),
    "avx2_vnni": (("avx2",), (2, 2, 8)),
    "avx2": (("baseline",), (2, 2, 8 / 3)),
    "neon_bf16": (("neon_i8mm",), (1, 4, 8)),
    "neon_i8mm": (("neon_dotprod",), (1, 1, 8)),
    "neon_dotprod": (("neon",), (1, 1, 4)),
    "neon": (("baseline",), (1, 1, 4 / 3)),
    "baseline": ((), (0.4, 0.4, 0.2)),
}


def common_level(levels: Iterable[str]) -> str:
    """Returns the best level that every host has, as `ckdist.comm.agreement` chooses it."""
    first, *others = (_lower(level) for level in levels)
    return next(level for level in _LEVELS if level in first and all(level in other for other in others))


def _lower(level: str) -> set[str]:
    """Returns a level and all lower ones."""
    return {level}.union(*(_lower(below) for below in _LEVELS[level][0]))


def at_level(machine: MachineSpec, level: str) -> MachineSpec:
    """Returns the machine at a lower level, with rates in proportion to the operations of an instruction."""
    if level == machine.isa:
        return machine
    factors = [new / old for new, old in zip(_LEVELS[level][1], _LEVELS[machine.isa][1], strict=True)]

    def scaled(kind: str, one: float, many: float) -> tuple[float, float]:
        """Returns the rates of a type of weights."""
        known = FORMATS.index(kind) if kind in FORMATS else len(FORMATS) - 1
        form = (
            activation_format(BY_NAME[kind].number, machine.isa) if kind in BY_NAME and kind not in FORMATS else known
        )
        return one * factors[form], many * factors[form]

    rates = {kind: scaled(kind, *pair) for kind, pair in machine.rates.items()}
    attention, elementwise = machine.attention * factors[0], machine.elementwise * factors[0]
    return replace(machine, isa=level, rates=rates, attention=attention, elementwise=elementwise)
