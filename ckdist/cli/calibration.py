"""The part of a machine's figures that kernels alone do not show: what memory, products, attention and row steps reach
inside of whole steps, from the steps of models that are made up here and are in no catalogue.

Threads write when they begin and end each step, so each figure is solved for by the seconds of what depends on it: what
else is wrong in the model, or slow at that moment, does not go into it.
"""

import contextlib
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckdist.cli.made_models import (
    ALL_BEHIND,
    ALONE,
    BEHIND,
    BYTE_TYPES,
    DEPTHS,
    EVICTED,
    FAR,
    FEW,
    LEAST,
    LONG,
    NEAR,
    NEAR_STEPS,
    PIECE,
    PROMPTED,
    SOME,
    TOGETHER,
    TYPES,
    cache_bytes,
    made_cases,
)
from ckdist.cli.traced_steps import Groups, OtherBytes, TracedSteps
from ckdist.comm.protocol import World
from ckdist.config.engine import EngineConfig
from ckdist.engine.launch import Model, load_model
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import ATTENTION, EXPERTS, HEADS, OTHERS, PRODUCT, CostModel
from ckdist.planning.machine import PRODUCT_ROWS, MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.planning.step_shape import StepShape
from ckdist.program.batch import BLOCK_TOKENS
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.packed_type import activation_format

TURNS = 3
MOST_FACTOR, MOST_FASTER = 4.0, 1.25  # that products in steps are slower than alone, and faster
# From all of the shorter part hidden to reading and computing by turns; and then around the best of these.
LOSSES, FINER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), tuple(0.02 * step for step in range(-9, 10))
LOSS_BOUNDS = 0.01, 4.0  # of products of several rows
HALVINGS = 15  # of the logarithms of bounds, by which a figure is found
LEAST_SECONDS = 1e-9  # that a group of steps counts as
ROUNDS = 8  # in which figures that depend on each other are found
ONCE = 1e-9, 1e-4  # bounds of seconds of one head, or expert, or of a layer's attention,
SHARES = 0.02, 4.0  # of parts of rates,
RATES = 1e7, 1e13  # bounds of operations per second, and of bytes
LEAST_ACHIEVED = 0.01  # of memory's bandwidth
MOST_REUSE, MOST_BYTES = 20.0, 1e16  # times faster than memory at most; more bytes than any model has

Setter = Callable[[MachineSpec, float], MachineSpec]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one model: seconds of steps by shape and group, of each turn, and its costs. `evicted`: so much was read
    before each step that weights and caches come from memory; else what the steps read themselves.
    """

    times: Mapping[StepShape, Sequence[Groups]]
    cost: CostModel
    evicted: bool = True

    def joined(self, other: "Measured") -> "Measured":
        """With what was measured at another time."""
        both = {shape: [*each, *other.times[shape]] for shape, each in self.times.items()}
        return dataclasses.replace(self, times=both)

    def seconds(self, shape: StepShape, group: str) -> float:
        """The median of the turns."""
        return statistics.median(one.get(group, 0.0) for one in self.times[shape])

    def left(self, shape: StepShape) -> float:
        """Seconds of a step that belong to no group, from its end to the next; in the median."""
        return statistics.median(max(0.0, 2 * one["total"] - sum(one.values())) for one in self.times[shape])

    def predicted(self, spec: MachineSpec, shape: StepShape, group: str) -> float:
        """Seconds of a group of a step on a machine, whose caches hold as much as they did here."""
        if self.evicted:
            spec = dataclasses.replace(spec, reuse=())
        return self.cost.on(spec).group_seconds(shape, group)

    def error(self, spec: MachineSpec, shape: StepShape, group: str) -> float:
        """The logarithm of predicted over measured."""
        return math.log(self.predicted(spec, shape, group) / max(self.seconds(shape, group), LEAST_SECONDS))


def solved(
    spec: MachineSpec,
    change: str | Setter,
    bounds: tuple[float, float],
    group: str,
    *cases: tuple[Measured, StepShape],
    beside: str = "",
) -> MachineSpec:
    """The machine with the figure for which a group of some models' steps takes as long as was measured, in the
    geometric mean, by bisection; at its bounds, the nearest. `change`: the figure's name, or what makes a machine of a
    value. `beside`: a group of the same steps than which it is not to be more wrong, as both read at one rate.
    """
    changed = change if callable(change) else lambda of, value: dataclasses.replace(of, **{change: value})
    others = sum(one.error(spec, shape, beside) for one, shape in cases) if beside else 0.0
    error = lambda value: sum(one.error(changed(spec, value), shape, group) for one, shape in cases) - others
    low, high = bounds
    grows = error(high) > error(low)
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
        if (error(middle) < 0) == grows:
            low = middle
        else:
            high = middle
    return changed(spec, high if low == bounds[0] else low)


def measured_steps(spec: MachineSpec, world: World, models: pathlib.Path) -> dict[str, Measured]:
    """The steps of the models of MADE, which lie in a folder, on all ranks, and those with nothing read in between
    (NEAR). On rank 0, a collective call.
    """
    others = OtherBytes(int(EVICTED * cache_bytes()) if world.rank == 0 else 0)
    found: dict[str, Measured] = {}
    try:
        for name, folder, quantize, shapes in made_cases():
            with _loaded(spec, models / folder, quantize, world) as (model, cost):
                if world.rank == 0:
                    steps = TracedSteps(model, others)
                    if shapes:
                        found[name] = _from_memory(steps, cost, shapes)
                    if name in NEAR_STEPS:
                        found[name + NEAR] = _near(steps, cost, NEAR_STEPS[name])
    finally:
        others.close()
    return found


def calibrated(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with what whole steps reach of its bandwidth, products, attention and elementwise rate."""
    plain, latent, mixture = (found[name] for name in ("plain", "latent", "mixture"))
    spec = dataclasses.replace(spec, reuse=())
    spec = solved(spec, "elementwise", (1e6, 1e11), OTHERS, (plain, PROMPTED))
    spec = _with_products(_between_steps(_with_reading(spec, found), found), found)
    for _ in range(ROUNDS):
        spec = solved(spec, "attention", RATES, ATTENTION, (plain, PROMPTED))
        spec = solved(spec, "attention_scores", RATES, ATTENTION, (mixture, PROMPTED))
    spec = solved(spec, "latent", RATES, ATTENTION, (latent, PROMPTED))
    spec = solved(spec, "heads", RATES, HEADS, (latent, PROMPTED))
    spec = solved(spec, "heads_int8", RATES, HEADS, (found["latent Q8_0"], PROMPTED))
    heads = ((found[name + NEAR], shape) for name in ("latent", "latent Q8_0") for shape in (ALONE, TOGETHER))
    spec = solved(spec, "heads_once", ONCE, HEADS, *heads, beside=PRODUCT)
    of_bytes = found["mixture Q4_K"]
    for _ in range(ROUNDS):
        spec = solved(spec, "achieved_experts", SHARES, EXPERTS, (mixture, PROMPTED))
        spec = solved(spec, "achieved_experts_int8", SHARES, EXPERTS, (of_bytes, PROMPTED))
        spec = solved(spec, "experts_once", ONCE, EXPERTS, (of_bytes, ALONE))
    return _with_single_tokens(spec, found)


def _with_single_tokens(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with what attention of single tokens reaches: by short contexts what each token costs, and what one
    step of them costs; how fast caches are read by a model of many layers and by one of a single layer; and computing
    by one whose heads share keys and values.
    """
    grouped, latent, deep = (found[name + NEAR] for name in ("grouped", "latent", f"{FAR} deep"))
    least, same = found[f"{LEAST} same{NEAR}"], [found[f"{name} same{NEAR}"] for name in TYPES]
    for _ in range(ROUNDS):
        spec = solved(spec, "attention_given", RATES, ATTENTION, *((one, TOGETHER) for one in same))
        spec = solved(spec, "attention_once", ONCE, ATTENTION, *((one, ALONE) for one in same))
        read = (least, BEHIND), (deep, BEHIND), (deep, ALL_BEHIND)
        spec = solved(spec, "attention_read", SHARES, ATTENTION, *read)
        spec = solved(spec, "attention_one", RATES, ATTENTION, (grouped, BEHIND))
        spec = solved(spec, "latent_given", RATES, ATTENTION, (latent, TOGETHER))
        spec = solved(spec, "latent_once", ONCE, ATTENTION, (latent, ALONE))
        spec = solved(spec, "latent_one", RATES, ATTENTION, (latent, BEHIND))
    return spec


def _with_reading(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with the rates at which weights are read in steps, and the part of computing that reading does not
    hide: between LOSSES that with which types of weights, which compute more and less than they read, agree best about
    the rates from memory and of models of as many bytes.
    """
    best = min(LOSSES, key=lambda loss: _with_rates(spec, found, loss)[1])
    near = (loss for step in FINER if 0 <= (loss := best + step) <= 1)
    return _with_rates(spec, found, min(near, key=lambda loss: _with_rates(spec, found, loss)[1]))[0]


def _between_steps(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with the time between steps: by a line from models that read little to the one that reads most."""
    few, most = [found[f"{name} same{NEAR}"] for name in TYPES], found[f"plain deep{NEAR}"]
    size = statistics.mean(_cycle(one) for one in few)
    near, far = statistics.median(one.left(ALONE) for one in few), most.left(ALONE)
    far = max(near, far)
    first = max(0.0, near - (far - near) * size / (_cycle(most) - size))
    return dataclasses.replace(spec, between=min(1.0, first), between_far=min(1.0, far))


def _cycle(one: Measured) -> float:
    """Bytes that all ranks of a node read in a step of one token."""
    return one.cost.bytes_read(ALONE).always * one.cost.neighbours


def _with_rates(spec: MachineSpec, found: Mapping[str, Measured], loss: float) -> tuple[MachineSpec, float]:
    """The machine with a loss and the rates of models of all depths: after the most bytes that of memory, before that
    those of a cache. After more bytes it is never faster, so that where it seems otherwise all that are in question
    have the mean; and the variances of logarithms of rates of models of as many bytes, and of those from memory.
    """
    spec = dataclasses.replace(spec, overlap_loss=loss)
    bounds = spec.bandwidth / MOST_FACTOR, spec.bandwidth * MOST_REUSE

    def case(name: str) -> tuple[float, float]:
        """Bytes of a model, and the logarithm of the rate at which they are read."""
        one = found[name]
        reads = solved(spec, _reading if one.evicted else _reusing, bounds, PRODUCT, (one, ALONE))
        rate = reads.bandwidth * reads.achieved_bandwidth if one.evicted else reads.reuse[0][1]
        return _cycle(one), math.log(rate)

    same, far = [case(f"{name} same{NEAR}") for name in TYPES], [case(name) for name in TYPES]
    cases = [case(f"{name} {depth}{NEAR}") for name in TYPES for depth in DEPTHS if depth != "same"]
    cases.append((statistics.mean(size for size, _ in same), statistics.mean(rate for _, rate in same)))
    pools: list[list[tuple[float, float]]] = []  # sizes and rates of each
    mean = lambda pool: statistics.mean(rate for _, rate in pool)
    for each in sorted(cases):
        pools.append([each])
        while len(pools) > 1 and mean(pools[-1]) >= mean(pools[-2]):
            pools[-2:] = [pools[-2] + pools[-1]]
    curve = tuple((size, math.exp(mean(pool))) for pool in pools for size, _ in pool)
    found_rates = dataclasses.replace(_reading(spec, curve[-1][1]), reuse=curve)
    return found_rates, sum(statistics.pvariance(rate for _, rate in each) for each in (same, far))


def _reading(spec: MachineSpec, rate: float) -> MachineSpec:
    """The machine whose nodes read so many bytes per second in steps; memory gives that much at least."""
    most = max(spec.bandwidth, rate)
    core = max(spec.core_bandwidth, most / spec.cores)
    return dataclasses.replace(spec, bandwidth=most, achieved_bandwidth=rate / most, core_bandwidth=core)


def _reusing(spec: MachineSpec, rate: float) -> MachineSpec:
    """The machine whose nodes read all weights again at so many bytes per second, be memory faster or not."""
    return dataclasses.replace(spec, reuse=((MOST_BYTES, rate),), achieved_bandwidth=LEAST_ACHIEVED)


def _with_products(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with the rates that products reach in steps, and what of the hidden part costs those of several rows:
    rates of FEW rows by weights from a cache, where computing takes longer, the loss by those from memory.
    """
    for _ in range(ROUNDS):
        cases = [(found[f"{name} deep{NEAR}"], TOGETHER) for name in TYPES]
        rates = _with_row_rates(spec, found)
        spec = dataclasses.replace(spec, rows_loss=solved(rates, "rows_loss", LOSS_BOUNDS, PRODUCT, *cases).rows_loss)
    return _with_row_rates(spec, found)


def _with_row_rates(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with the rates that products of the measured types reach in steps; of other types of the same
    activations, the rates of kernels alone change by the same factors.
    """
    at = {PRODUCT_ROWS.index(FEW): TOGETHER, PRODUCT_ROWS.index(SOME): PIECE, len(PRODUCT_ROWS) - 1: PROMPTED}
    kinds = {"plain": "BF16"} | {name: name for name in BYTE_TYPES}
    factors: dict[str, list[float]] = {kind: [1.0] * len(PRODUCT_ROWS) for kind in kinds.values()}
    for name, kind in kinds.items():
        for index, shape in at.items():
            times = lambda of, value, index=index, kind=kind: of.with_product(kind, index, value)
            alone = spec.products[kind][index]
            bounds = alone / MOST_FACTOR, alone * MOST_FASTER
            one = found[f"{name} same{NEAR}" if shape is TOGETHER else name]
            factors[kind][index] = solved(spec, times, bounds, PRODUCT, (one, shape)).products[kind][index] / alone
        factors[kind][2] = math.sqrt(factors[kind][1] * factors[kind][3])  # of rows between those
    of_bytes = zip(*(factors[kind] for kind in BYTE_TYPES), strict=True)
    mean = [math.prod(each) ** (1 / len(each)) for each in of_bytes]
    products = {}
    for kind, alone in spec.products.items():
        form = activation_format(dtypes.BY_NAME[kind].number, spec.isa)
        each = factors.get(kind, (None, factors["BF16"], mean)[form] or [1.0] * len(PRODUCT_ROWS))
        products[kind] = tuple(rate * factor for rate, factor in zip(alone, each, strict=True))
    return dataclasses.replace(spec, products=products)


@contextlib.contextmanager
def _loaded(
    spec: MachineSpec, folder: pathlib.Path, quantize: str | None, world: World
) -> Iterator[tuple[Model, CostModel]]:
    """A model on all ranks, those behind the first of which do as that one does, and what its steps cost; a collective
    call.
    """
    config = EngineConfig(
        model=str(folder), ctx_size=LONG + 2 * BLOCK_TOKENS, parallel=FEW, repack="off", prefill="tensor",
        quantize=quantize, threads=max(1, spec.total_cores // world.local_size),
    )  # fmt: skip
    cluster = Cluster(spec, hosts=world.size // world.local_size, ranks=world.local_size)
    cost = Predictor(open_checkpoint(folder), cluster, Way("tensor"), quantize=quantize).stages[0].costs[0]
    model = load_model(config, world)
    try:
        if world.rank:
            model.executable.work()
        yield model, cost
    finally:
        model.close()


def _from_memory(steps: TracedSteps, cost: CostModel, shapes: Sequence[StepShape]) -> Measured:
    """Steps of some shapes, whose weights are in no cache if they decode."""
    count = lambda shape: max(0, int(EVICTED * cache_bytes() - cost.bytes_read(shape).always))
    turns = steps.measured([(shape, count(shape)) for shape in shapes], TURNS)
    return Measured(dict(zip(shapes, turns, strict=True)), cost)


def _near(steps: TracedSteps, cost: CostModel, shapes: Sequence[StepShape]) -> Measured:
    """Steps of some shapes, with nothing read between them."""
    turns = steps.measured([(shape, 0) for shape in shapes], TURNS)
    return Measured(dict(zip(shapes, turns, strict=True)), cost, evicted=False)


__all__ = ["Measured", "calibrated", "measured_steps", "solved"]
