"""ZeRO with sharded parameters: steps that gather parameters shortly before their use, and free them after it.

Parameters that follow one another are gathered together, in *units*. While a unit is used, the next one is gathered.
The first units stay in memory, with their gradients: to make pages again takes longer than small steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckdist.layout import Range
from ckdist.program.lower_training import is_kept
from ckdist.program.lowered import Lowered, StepList
from ckdist.program.step import GradientIndex, PackIndex, ParameterIndex, Step

UNIT_FLOATS = 4 << 20  # a unit with fewer floats has the next parameter too
AHEAD = 1  # units that are gathered before they are used
UNDER_WAY = 2  # sums of gradients, as in native/runtime/training.cpp
PLACE = "place_parameters"


def with_gathers(lowered: Lowered) -> Lowered:
    """Returns the program with such steps in each list."""
    units, unit_of = _units(lowered)
    lists = [replace(one, steps=list(_placed(lowered, one, units, unit_of))) for one in lowered.lists]
    return replace(lowered, lists=lists)


def _units(lowered: Lowered) -> tuple[list[Range], dict[int, int]]:
    """The range of each unit in the arena, and the unit of each trained parameter."""
    units: list[Range] = []
    unit_of: dict[int, int] = {}
    for index, place in enumerate(lowered.parameters):
        if place.stored or place.offset >= lowered.trained_floats:
            continue
        begin, end = units[-1] if units else (0, 0)
        if units and end - begin < UNIT_FLOATS:
            units[-1] = begin, place.end
        else:
            units.append((place.offset, place.end))
        unit_of[index] = len(units) - 1
    return units, unit_of


def _used(lowered: Lowered, step: Step, unit_of: dict[int, int]) -> list[int]:
    """The units that a step reads."""
    packed = [p for pack in step.operands(PackIndex) for p in lowered.packs[pack][1]]
    read = [*step.operands(ParameterIndex), *packed]
    return sorted({unit_of[int(p)] for p in read if int(p) in unit_of})


def _placed(lowered: Lowered, steps: StepList, units: Sequence[Range], unit_of: dict[int, int]) -> Iterator[Step]:
    """The steps of a list, with those that gather and free."""
    used = [_used(lowered, step, unit_of) for step in steps.steps]
    flat = lambda some: [edge for unit in some for edge in units[unit]]
    stays = lambda unit: is_kept(units[unit][1])
    gathers: dict[int, int] = {}  # unit in memory -> number of its gather
    begun = awaited = 0
    for index, step in enumerate(steps.steps):
        if used[index]:
            ahead = _next(used[index + 1 :], used[index])
            freed = [unit for unit in gathers if unit not in (*used[index], *ahead) and not stays(unit)]
            fresh = [unit for unit in (*used[index], *ahead) if unit not in gathers]
            gathers = {unit: number for unit, number in gathers.items() if unit not in freed}
            gathers |= {unit: begun + number for number, unit in enumerate(fresh, 1)}
            begun += len(fresh)
            before, awaited = awaited, max(awaited, *(gathers[unit] for unit in used[index]))
            if fresh or freed or awaited > before:
                yield _place(flat(freed), flat(fresh), awaited)
        yield step
    yield _place(flat(unit for unit in gathers if not stays(unit)), [], 0)


def _next(used: Sequence[list[int]], now: Sequence[int]) -> list[int]:
    """The next units that are used after those of `now`."""
    found: list[int] = []
    for units in used:
        found += [unit for unit in units if unit not in (*found, *now)]
        if len(found) >= AHEAD:
            break
    return found


def _place(freed: list[int], gathered: list[int], awaited: int) -> Step:
    counts = {"freed_count": len(freed) // 2, "gathered_count": len(gathered) // 2}
    return Step(PLACE, {"freed": freed, "gathered": gathered, **counts, "awaited": awaited})


class Floats(NamedTuple):
    """Floats in memory at once: of other ranks' parameters, and of gradients that are not summed yet."""

    gathered: int
    gradients: int


def most_floats(lowered: Lowered, own: Range) -> Floats:
    """The largest sum of both over all steps, for the rank that owns the floats `own`. Sums free gradients."""
    return max((max(_floats(lowered, steps, own), key=sum) for steps in lowered.lists), key=sum)


def _floats(lowered: Lowered, steps: StepList, own: Range) -> Iterator[Floats]:
    """The floats in memory during each step."""
    kept_gradients, kept_units = _kept(lowered)
    end = max((end for _, end in kept_gradients), default=0)

    def size(p: int) -> int:
        place = lowered.parameters[p]
        return 0 if place.offset < end else place.rows * place.columns

    live, ended, gathered = {p: size(p) for p in steps.cleared}, list[int](), sum(outside(u, own) for u in kept_units)
    kept, waiting = sum(last - first for first, last in kept_gradients), sum(live.values())
    for step in steps.steps:
        if step.kind == PLACE:
            for name, sign in (("freed", -1), ("gathered", 1)):
                pairs = _pairs(step.fields[name])
                gathered += sign * sum(outside(pair, own) for pair in pairs if pair not in kept_units)
        if written := step.operands(GradientIndex):
            live |= {int(p): size(int(p)) for p in written}
            waiting = sum(live.values())
        yield Floats(gathered, kept + waiting + sum(ended[-UNDER_WAY:]))
        if step.kind == "reduce_gradients":
            begin, last = step.fields["begin"], step.fields["end"]
            ended.append(0 if step.fields["kept"] else last - begin)
            live = {p: floats for p, floats in live.items() if not begin <= lowered.parameters[p].offset < last}
            waiting = sum(live.values())


def _kept(lowered: Lowered) -> tuple[set[Range], set[Range]]:
    """The ranges of gradients, and the units, that stay in memory."""
    gradients, units = set[Range](), set[Range]()
    for step in lowered.steps:
        if step.kind == "reduce_gradients" and step.fields["kept"]:
            gradients.add((step.fields["begin"], step.fields["end"]))
        if step.kind == PLACE:
            units |= {pair for pair in _pairs(step.fields["gathered"]) if is_kept(pair[1])}
    return gradients, units


def _pairs(edges: Sequence[int]) -> Iterator[Range]:
    return zip(edges[::2], edges[1::2], strict=True)


def outside(some: Range, own: Range) -> int:
    """Floats of a range that are not in `own`."""
    begin, end = some
    return end - begin - max(0, min(end, own[1]) - max(begin, own[0]))
