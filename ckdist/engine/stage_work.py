"""The work of each pipeline stage, and the costs of steps through all of them."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckdist.layouts.rough_cost import ATTENTION, OPERATIONS, attended_width, work
from ckdist.layouts.stage_plan import PROMPT
from ckdist.mesh import Mesh
from ckdist.program.program import Program
from ckdist.program.stage_costs import StageCosts
from ckdist.weights.packed_type import WeightCost

STEP_READ = 30e9  # bytes/s of weights in a step; most of the reading is hidden


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
