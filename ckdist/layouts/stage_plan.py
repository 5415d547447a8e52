"""Divides the layers of a model over pipeline stages, and gives the costs of steps to the scheduler."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ckdist.errors import ConfigError
from ckdist.layout import Range
from ckdist.layouts.rough_cost import ATTENTION, OPERATIONS, attended_width, work
from ckdist.mesh import Mesh
from ckdist.program.program import Program
from ckdist.program.stage_costs import StageCosts
from ckdist.weights.packed_type import WeightCost

PROMPT = 2048  # tokens of the prompt for which layers are divided
STEP_READ = 30e9  # bytes/s of weights in a step; most of the reading is hidden


def check_stages(count: int, ranks: int, layers: int) -> None:
    """Raises ConfigError if `count` stages do not fit the numbers of ranks and layers."""
    flag = f"--pipeline-parallel-size {count}"
    if count > layers:
        raise ConfigError(f"{flag} is more than the {layers} layers of the model: each stage has at least one layer")
    if ranks % count:
        raise ConfigError(f"{flag} does not divide {ranks} rank{'s' * (ranks > 1)}: start a multiple of {count} ranks")


def divide_layers(program: Program, count: int, isa: str, weight: Callable[[str], WeightCost]) -> list[Range]:
    """Divides the layers of a program for one rank into `count` stages of even cost.

    A layer's cost is its fraction of a decode step, in which the head is a large part, plus its fraction of a prompt,
    which needs the head for one row.

    Args:
        isa: Level of instructions of the ranks.
        weight: The cost of a matrix per element.
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
    return even_slices([decode + prompt for decode, prompt in zip(*shares, strict=True)], count)


class StageWork(NamedTuple):
    """The work of one rank of a stage."""

    computed: float  # seconds of products per prompt token, without the head
    attended: float  # seconds of attention per prompt token and token of context
    read: float  # bytes of weights that a step with a prompt reads, without the head
    decode_read: float  # bytes of weights that a decode step reads


def stage_work(program: Program, mesh: Mesh, weight: Callable[[str], WeightCost], isa: str) -> StageWork:
    """The work of one rank of a stage with this program. `weight`: the cost of a matrix per element."""
    layers = [i for i in program.instrs if i.op not in ATTENTION and i.inputs and i.inputs[0].dims[0].name == "tokens"]
    prompt = work(layers, mesh, weight, isa, PROMPT)
    attends = [i for i in program.instrs if i.op in ATTENTION and not i.attrs.get("window")]
    rate = OPERATIONS.get(isa, OPERATIONS["avx2"])[0]
    attended = sum(2.0 * attended_width(i, mesh) / rate for i in attends)
    return StageWork(prompt.computed / PROMPT, attended, prompt.read, work(program.instrs, mesh, weight, isa, 1).read)


def stage_costs(works: Sequence[StageWork]) -> StageCosts:
    """The costs of steps, from the work of one rank of each stage.

    A step reads the weights of its layers for any number of tokens. For mixtures, it reads more experts than a token
    uses.
    """
    computed, attended, read, decode_read = (list(each) for each in zip(*works, strict=True))
    cost = sum(read) / STEP_READ / sum(computed)
    doubling = sum(computed) / sum(attended) if any(attended) else math.inf
    return StageCosts(len(works), cost, doubling, max(decode_read) / sum(decode_read))


def even_slices(costs: Sequence[float], count: int) -> list[Range]:
    """`count` contiguous slices of `costs`, none empty, with the smallest largest sum; ties: the most even ones."""
    sums = [sum(costs[:i]) for i in range(len(costs) + 1)]

    @cache
    def best(begin: int, slices: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest sum, sum of squares, ends of the slices) for the costs from `begin` on."""
        if slices == 1:
            own = sums[-1] - sums[begin]
            return own, own * own, (len(costs),)
        found = []
        for end in range(begin + 1, len(costs) - slices + 2):
            own, (largest, squares, ends) = sums[end] - sums[begin], best(end, slices - 1)
            found.append((max(own, largest), own * own + squares, (end, *ends)))
        return min(found)

    return list(pairwise((0, *best(0, count)[2])))


__all__ = ["StageWork", "check_stages", "divide_layers", "even_slices", "stage_costs", "stage_work"]
