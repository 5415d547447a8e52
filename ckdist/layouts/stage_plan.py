"""Divides the layers of a model over pipeline stages."""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import pairwise

from ckdist.errors import ConfigError
from ckdist.layout import Range
from ckdist.layouts.rough_cost import work
from ckdist.mesh import Mesh
from ckdist.program.program import Instr, Program
from ckdist.weights.packed_type import WeightCost

PROMPT = 2048  # tokens of the prompt for which layers are divided


def check_stages(count: int, ranks: int, layers: int) -> None:
    """Raises ConfigError if `count` stages do not fit the numbers of ranks and layers."""
    flag = f"--pipeline-parallel-size {count}"
    if count > layers:
        raise ConfigError(f"{flag} is more than the {layers} layers of the model: each stage has at least one layer")
    if ranks % count:
        raise ConfigError(f"{flag} does not divide {ranks} rank{'s' * (ranks > 1)}: start a multiple of {count} ranks")


def divide_layers(
    program: Program, count: int, isa: str, weight: Callable[[str], WeightCost], speeds: Sequence[int] = ()
) -> list[Range]:
    """Divides the layers of a program for one rank into `count` stages of even cost.

    A layer's cost is its fraction of a decode step, in which the head is a large part, plus its fraction of a prompt,
    which needs the head for one row.

    Args:
        isa: Level of instructions of the ranks.
        weight: The cost of a matrix per element.
        speeds: Relative speeds of the stages; (): all are equal.
    """
    parts, ends = [[]], {v.name for v in program.boundaries}
    for instr in program.instrs:
        parts[-1].append(instr)
        if any(v.name in ends for v in instr.outputs):
            parts.append([])
    shares = []
    for tokens in (1, PROMPT):
        embedding, *layers, last = [work(part, Mesh(), weight, isa, tokens).seconds for part in parts]
        layers[0] += embedding
        layers[-1] += last  # the head
        shares.append([each / sum(layers) for each in layers])
    costs = [decode + prompt for decode, prompt in zip(*shares, strict=True)]
    starts = first_layers(parts[1:-1], {v.name for v in program.carried})
    if len(starts) < count:
        raise ConfigError(
            f"--pipeline-parallel-size {count} is more than the {len(starts)} groups of layers of the model: layers "
            "that share a selection of positions, or keys, are in one stage"
        )
    bounds = [*starts, len(costs)]
    slices = even_slices([sum(costs[begin:end]) for begin, end in pairwise(bounds)], count, speeds)
    return [(bounds[begin], bounds[end]) for begin, end in slices]


def first_layers(layers: Sequence[Sequence[Instr]], carried: Collection[str] = ()) -> list[int]:
    """The layers that a stage may begin with: they and later ones read the boundary before, and `carried` values."""
    made = {
        v.name: i
        for i, part in enumerate(layers)
        for instr in part[:-1]
        for v in instr.outputs
        if v.name not in carried
    }
    reads = [
        min([i, *(made.get(v.name, i) for instr in part if instr.op != "tally" for v in instr.inputs)])
        for i, part in enumerate(layers)
    ]
    return [i for i in range(len(layers)) if min(reads[i:]) >= i]


def even_slices(costs: Sequence[float], count: int, speeds: Sequence[int] = ()) -> list[Range]:
    """`count` contiguous slices of `costs`, none empty, with the smallest largest sum; ties: the most even ones.

    `speeds`: each slice's sum is divided by its relative speed.
    """
    sums, speeds = [sum(costs[:i]) for i in range(len(costs) + 1)], speeds or (1,) * count

    @cache
    def best(begin: int, slices: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest sum, sum of squares, ends of the slices) for the costs from `begin` on."""
        if slices == 1:
            own = (sums[-1] - sums[begin]) / speeds[-1]
            return own, own * own, (len(costs),)
        found = []
        for end in range(begin + 1, len(costs) - slices + 2):
            own, (largest, squares, ends) = (sums[end] - sums[begin]) / speeds[-slices], best(end, slices - 1)
            found.append((max(own, largest), own * own + squares, (end, *ends)))
        return min(found)

    return list(pairwise((0, *best(0, count)[2])))
