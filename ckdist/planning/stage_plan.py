"""Assigns ranks and layers to pipeline stages.

The mesh of a job is pp x tp, with hosts outermost, so the ranks of a stage are consecutive and usually on one host.
Rank 0 schedules and samples. Its stage is the last one, so logits are made on the rank that samples, and the next batch
carries the tokens to the first stage. Rank 0 sends batches to all ranks, and each stage sends rows to the next one:

    ranks 0, 1    last stage        rows from ranks 4, 5
    ranks 2, 3    first stage       rows to ranks 4, 5
    ranks 4, 5    second stage      rows from ranks 2, 3, and to ranks 0, 1
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ckdist import native
from ckdist.comm.group_world import GroupWorld
from ckdist.comm.transports.link import Link
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError
from ckdist.layout import Range
from ckdist.mesh import Mesh
from ckdist.planning.cost import PRODUCTS, CostModel, RankPlace, matrices_of, nominal
from ckdist.planning.kernel_speed import attention_rate, product_rate
from ckdist.planning.machine_spec import PRODUCT_ROWS, MachineSpec
from ckdist.planning.memory_sizes import gigabytes
from ckdist.planning.step_shape import StepShape
from ckdist.program.program import Program
from ckdist.program.stage_costs import StageCosts
from ckdist.program.stage_slice import Stage
from ckdist.weights.dtypes import BY_NAME
from ckdist.weights.packed_type import WeightCost

PROMPT = 2048  # tokens of the prompt for which layers are divided
MIXTURES = 10  # number of weightings of decode cost and prompt cost that are tried
STEP_READ = 30e9  # bytes/s of weights and caches in a step; most of the reading is hidden
PIECE_TOKENS, MATRIX_ROWS = 192, 1024  # sizes of measured products
KERNEL_SECONDS, KERNEL_REPEATS = 0.002, 8  # short with many repeats: the best is right even if cores are preempted


@dataclass(frozen=True)
class StageRank:
    """The place of a rank in the stages of a job."""

    stage: Stage
    world: World  # the ranks of the stage
    previous: int = -1  # the job's rank that sends rows to this one; -1: none
    next: int = -1  # the job's rank that receives rows from this one; -1: none


def stage_rank(world: World, layers: Sequence[Range]) -> StageRank:
    """The place of this rank in a job with one stage for each range in `layers`."""
    count = len(layers)
    if count == 1:
        return StageRank(Stage(0, 1, layers[0]), world)
    mesh = Mesh.of_job(world.size, world.rank, dp=1, pp=count, tp=world.size // count)
    number = (mesh.index("pp") - 1) % count
    peers = [place.rank for place in mesh.along("pp")]  # the rank with the same index in each stage
    stage, at = Stage(number, count, layers[number]), mesh.index("pp")
    return StageRank(
        stage,
        GroupWorld(world, mesh.group("tp")),
        -1 if stage.first else peers[at - 1],
        -1 if stage.last else peers[(at + 1) % count],
    )


def check_stages(count: int, ranks: int, layers: int) -> None:
    """Raises ConfigError if `count` stages do not fit the numbers of ranks and layers."""
    flag = f"--pipeline-parallel-size {count}"
    if count > layers:
        raise ConfigError(f"{flag} is more than the {layers} layers of the model: each stage has at least one layer")
    if ranks % count:
        raise ConfigError(f"{flag} does not divide {ranks} rank{'s' * (ranks > 1)}: start a multiple of {count} ranks")


def divide_layers(program: Program, count: int, isa: str, weight: Callable[[str], WeightCost]) -> list[Range]:
    """Divides the layers of a program for one rank into `count` stages.

    The slowest stage limits both decode, in which the head is a large part, and prompts, which need the head for one
    row. The product of the slowest stage's fractions of both is minimised: no other division makes one of them faster
    by some factor without making the other one slower by more. `CostModel` predicts the costs; `weight` is as there.
    """
    model = CostModel(program, Mesh(), [RankPlace("", 0, 0, 1, {})], nominal(isa), weight)
    decode, prompt = (_layer_shares(model.seconds_between_boundaries(program, tokens)) for tokens in (1, PROMPT))
    return even_in_both(decode, prompt, count)


def _layer_shares(seconds: Sequence[float]) -> list[float]:
    """Each layer's fraction of the total. The first includes the embedding, the last the head."""
    embedding, *layers, head = seconds
    layers[0] += embedding
    layers[-1] += head
    return [each / sum(seconds) for each in layers]


def even_in_both(first: Sequence[float], second: Sequence[float], count: int) -> list[Range]:
    """`count` contiguous slices, none empty, with the smallest product of both largest sums.

    Candidates are the slices that are even for a weighting of both costs.
    """
    found = []
    for part in range(MIXTURES + 1):
        mixed = [part * a + (MIXTURES - part) * b for a, b in zip(first, second, strict=True)]
        slices = even_slices(mixed, count)
        found.append((math.prod(max(sum(costs[a:b]) for a, b in slices) for costs in (first, second)), slices))
    return min(found)[1]


class ProductWork(NamedTuple):
    """The work of one rank of a stage."""

    computed: float  # seconds of products per prompt token, without the head
    attended: float  # seconds of attention per prompt token and token of context
    read: float  # bytes of weights and caches that a step with a prompt reads, without the head
    decode_read: float  # bytes of weights that a decode step reads


def prompt_machine(
    program: Program, weight: Callable[[str], WeightCost], cpus: Sequence[int], cache: str
) -> MachineSpec:
    """A machine with nominal figures, but measured kernels for prompts: products, and attention on one CPU.

    Products have the program's types of weights. `cache` is the type of keys and values. It takes some hundredths of a
    second.
    """
    kinds = {weight(w.name).kind for instr in program.instrs if instr.op in PRODUCTS for w in matrices_of(instr)}
    rates = {
        kind: product_rate(cpus[:1], BY_NAME[kind].number, PIECE_TOKENS, KERNEL_SECONDS, MATRIX_ROWS, KERNEL_REPEATS)
        for kind in sorted(kinds)
    }
    attention = attention_rate(cpus[0], cache, KERNEL_SECONDS * KERNEL_REPEATS)
    products = {kind: (rate,) * len(PRODUCT_ROWS) for kind, rate in rates.items()}
    return replace(nominal(native.isa()), attention=attention, products=products)


def product_work(
    program: Program, mesh: Mesh, weight: Callable[[str], WeightCost], machine: MachineSpec
) -> ProductWork:
    """The work of one rank of a stage with this program. `weight(name)` is the cost of a matrix."""
    places, prompt = [RankPlace("", 0, 0, 1, {})] * math.prod(mesh.axes.values()), StepShape.prompt(PROMPT)
    model = CostModel(program, mesh, places, machine, weight)
    products = [instr for instr in program.instrs if instr.op in PRODUCTS]
    layers = [instr for instr in products if instr.inputs[0].dims[0].name == "tokens"]
    read = model.cache_read(StepShape.decode(1, PROMPT // 2))
    read += sum(model.product_work(instr, prompt)[1] for instr in layers)
    computed = sum(model.product_seconds(instr, prompt) for instr in layers)
    decode_read = sum(model.product_work(instr, StepShape.decode(1, 0))[1] for instr in products)
    attends = [i for i in program.instrs if i.op in ("attend", "attend_latent") and not i.attrs.get("window")]
    widths = lambda i: i.inputs[0].dims[1].local(mesh) + i.outputs[0].dims[1].local(mesh)
    attended = sum(2.0 * widths(i) / machine.attention_rate(i.op == "attend_latent") for i in attends)
    return ProductWork(computed / PROMPT, attended, read, decode_read)


def stage_costs(works: Sequence[ProductWork]) -> StageCosts:
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


def exchange_line(program: Program, hosts: int, link: Link) -> str:
    """One line that compares the exchange per decoded token without stages and with one stage per host."""
    message = link.message(4 * program.boundaries[0].dims[-1].elements) * 1e3  # ms
    sums, rows = sum(instr.op == "all_reduce" for instr in program.instrs), hosts - 1
    return (
        f"a decoded token takes {sums} sums over {hosts} hosts, {sums * message:.2f} ms by the link that was measured; "
        f"with -pp {hosts} it takes {rows} row{'s' * (rows > 1)}, {rows * message:.2f} ms, and hosts work on it "
        "one after the other"
    )


def stage_lines(ranks: Sequence[tuple[int, int, int, int]]) -> list[str]:
    """One line per stage: its parts and its ranks.

    `ranks`: for each rank (number of its stage, first layer, end of the layers, bytes of weights).
    """
    count, lines = max(number for number, *_ in ranks) + 1, []
    for number in range(count):
        own = [rank for rank, (other, *_) in enumerate(ranks) if other == number]
        _, begin, end, _ = ranks[own[0]]
        layers = f"layer {begin}" if end == begin + 1 else f"layers {begin} to {end - 1}"
        parts = [*(["embedding"] if number == 0 else []), layers, *(["head"] if number == count - 1 else [])]
        names = f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        size = gigabytes(sum(ranks[rank][3] for rank in own))
        lines.append(f"stage {number} of {count}: {', '.join(parts)}, {size} of weights on {names}")
    return lines


__all__ = [
    "ProductWork",
    "StageRank",
    "check_stages",
    "divide_layers",
    "even_in_both",
    "even_slices",
    "exchange_line",
    "product_work",
    "prompt_machine",
    "stage_costs",
    "stage_lines",
    "stage_rank",
]
