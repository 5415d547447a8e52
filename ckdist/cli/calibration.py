"""Machine figures that only whole steps show: achieved rates of memory, products, attention and row steps.

The steps run models with random weights (`made_models`). Threads record when they begin and end each step, so each
figure is solved from the seconds of the steps that depend on it. Errors elsewhere in the cost model, or a slow moment
elsewhere, do not change it.
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
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.start_up import Model, load_model
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import ATTENTION, EXPERTS, HEADS, OTHERS, PRODUCT, CostModel
from ckdist.planning.machine_spec import PRODUCT_ROWS, MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.planning.step_shape import StepShape
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.packed_type import activation_format

TURNS = 3
MOST_FACTOR, MOST_FASTER = 4.0, 1.25  # bounds: products in steps are slower than alone, or faster
# Candidates of `overlap_loss`. 0: the shorter of reading and computing is hidden. 1: they alternate. FINER has offsets
# around the best of LOSSES.
LOSSES, FINER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), tuple(0.02 * step for step in range(-9, 10))
LOSS_BOUNDS = 0.01, 4.0  # of `rows_loss`
HALVINGS = 15  # bisection steps between the logarithms of the bounds
LEAST_SECONDS = 1e-9  # least seconds of a group, so that its logarithm is finite
ROUNDS = 8  # fixed-point rounds for figures that depend on each other
ONCE = 1e-9, 1e-4  # bounds: seconds per head, per expert, or per layer of attention
SHARES = 0.02, 4.0  # bounds: shares of a rate
RATES = 1e7, 1e13  # bounds: operations/s, and bytes/s
LEAST_ACHIEVED = 0.01  # share of memory's bandwidth
MOST_REUSE, MOST_BYTES = 20.0, 1e16  # most times faster than memory; more bytes than any model has

Setter = Callable[[MachineSpec, float], MachineSpec]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Step times of one model, and its cost model."""

    times: Mapping[StepShape, Sequence[Groups]]  # shape -> seconds by group, one entry per turn
    cost: CostModel
    # True: other bytes were read before each step, so that weights and caches come from memory.
    # False: the step finds in the caches the data that earlier steps left there.
    evicted: bool = True

    def joined(self, other: "Measured") -> "Measured":
        """Adds the turns of another measurement of the same model."""
        both = {shape: [*each, *other.times[shape]] for shape, each in self.times.items()}
        return dataclasses.replace(self, times=both)

    def seconds(self, shape: StepShape, group: str) -> float:
        """Returns the median over the turns."""
        return statistics.median(one.get(group, 0.0) for one in self.times[shape])

    def left(self, shape: StepShape) -> float:
        """Returns the median seconds that belong to no group: from the end of a step to the next."""
        return statistics.median(max(0.0, 2 * one["total"] - sum(one.values())) for one in self.times[shape])

    def predicted(self, spec: MachineSpec, shape: StepShape, group: str) -> float:
        """Predicts the seconds of a group of a step on `spec`, with the caches as they were measured."""
        if self.evicted:
            spec = dataclasses.replace(spec, reuse=())
        return self.cost.on(spec).group_seconds(shape, group)

    def error(self, spec: MachineSpec, shape: StepShape, group: str) -> float:
        """log(predicted / measured)."""
        return math.log(self.predicted(spec, shape, group) / max(self.seconds(shape, group), LEAST_SECONDS))


def solved(
    spec: MachineSpec,
    change: str | Setter,
    bounds: tuple[float, float],
    group: str,
    *cases: tuple[Measured, StepShape],
    reference: str = "",
) -> MachineSpec:
    """Returns the machine with the figure for which the predicted time of a group matches the measured time.

    Bisects on the geometric mean of the ratios over `cases`. Outside the bounds, the nearest bound is used.

    Args:
        change: Name of the figure, or a function that sets it.
        bounds: Lowest and highest value of the figure.
        group: The group of steps to match.
        cases: Measured models and shapes.
        reference: Another group of the same steps. Its error is subtracted, because both groups read at one rate.
    """
    changed = change if callable(change) else lambda of, value: dataclasses.replace(of, **{change: value})
    others = sum(one.error(spec, shape, reference) for one, shape in cases) if reference else 0.0
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
    """Measures the steps of the models in the folder `models` on all ranks. A collective call.

    Returns:
        On rank 0, the measurements by name of MADE. Names that end in NEAR are of steps with nothing read in between.
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
    """Returns the machine with the achieved rates of whole steps: bandwidth, products, attention and elementwise."""
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
    spec = solved(spec, "heads_once", ONCE, HEADS, *heads, reference=PRODUCT)
    of_bytes = found["mixture Q4_K"]
    for _ in range(ROUNDS):
        spec = solved(spec, "achieved_experts", SHARES, EXPERTS, (mixture, PROMPTED))
        spec = solved(spec, "achieved_experts_int8", SHARES, EXPERTS, (of_bytes, PROMPTED))
        spec = solved(spec, "experts_once", ONCE, EXPERTS, (of_bytes, ALONE))
    return _with_single_tokens(spec, found)


def _with_single_tokens(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """Solves the figures of single-token attention.

    Short contexts give the cost of a token and of a step. Models with many layers and with one layer give the rate of
    reading caches. A model whose heads share keys and values gives the rate of computing.
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
    """Solves `overlap_loss` and the rates at which steps read weights.

    Some weight types need more time to compute than to read, others less. The loss is the one for which they agree best
    on the rate from memory and on the rate for models of equal bytes.
    """
    best = min(LOSSES, key=lambda loss: _with_rates(spec, found, loss)[1])
    near = (loss for step in FINER if 0 <= (loss := best + step) <= 1)
    return _with_rates(spec, found, min(near, key=lambda loss: _with_rates(spec, found, loss)[1]))[0]


def _between_steps(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """Solves the time between steps.

    It is linear in the bytes of a step, from models that read little to the one that reads most.
    """
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
    """Solves the reading rates of models of all depths for one `overlap_loss`.

    The curve has (bytes, bytes/s) points. The last point is memory's rate, earlier ones are those of a cache. More
    bytes are never read faster: neighbouring points that violate this get their mean rate.

    Returns:
        The machine, and the sum of two variances of log rates: of models of equal bytes, and of models read from
        memory.
    """
    spec = dataclasses.replace(spec, overlap_loss=loss)
    bounds = spec.bandwidth / MOST_FACTOR, spec.bandwidth * MOST_REUSE

    def case(name: str) -> tuple[float, float]:
        """Returns the bytes of a model, and the logarithm of the rate at which they are read."""
        one = found[name]
        reads = solved(spec, _reading if one.evicted else _reusing, bounds, PRODUCT, (one, ALONE))
        rate = reads.bandwidth * reads.achieved_bandwidth if one.evicted else reads.reuse[0][1]
        return _cycle(one), math.log(rate)

    same, far = [case(f"{name} same{NEAR}") for name in TYPES], [case(name) for name in TYPES]
    cases = [case(f"{name} {depth}{NEAR}") for name in TYPES for depth in DEPTHS if depth != "same"]
    cases.append((statistics.mean(size for size, _ in same), statistics.mean(rate for _, rate in same)))
    pools: list[list[tuple[float, float]]] = []  # each pool: (bytes, log rate) points with a common mean
    mean = lambda pool: statistics.mean(rate for _, rate in pool)
    for each in sorted(cases):
        pools.append([each])
        while len(pools) > 1 and mean(pools[-1]) >= mean(pools[-2]):
            pools[-2:] = [pools[-2] + pools[-1]]
    curve = tuple((size, math.exp(mean(pool))) for pool in pools for size, _ in pool)
    found_rates = dataclasses.replace(_reading(spec, curve[-1][1]), reuse=curve)
    return found_rates, sum(statistics.pvariance(rate for _, rate in each) for each in (same, far))


def _reading(spec: MachineSpec, rate: float) -> MachineSpec:
    """Sets the bytes/s that a node reads in steps. Memory's bandwidth is raised to it if necessary."""
    most = max(spec.bandwidth, rate)
    core = max(spec.core_bandwidth, most / spec.cores)
    return dataclasses.replace(spec, bandwidth=most, achieved_bandwidth=rate / most, core_bandwidth=core)


def _reusing(spec: MachineSpec, rate: float) -> MachineSpec:
    """Sets the bytes/s at which a node reads all weights again, even if memory is faster."""
    return dataclasses.replace(spec, reuse=((MOST_BYTES, rate),), achieved_bandwidth=LEAST_ACHIEVED)


def _with_products(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """Solves the achieved rates of products, and `rows_loss`.

    Models whose weights are in a cache give the rates of FEW rows, because computing then takes longer than reading.
    Models read from memory give the loss.
    """
    for _ in range(ROUNDS):
        cases = [(found[f"{name} deep{NEAR}"], TOGETHER) for name in TYPES]
        rates = _with_row_rates(spec, found)
        spec = dataclasses.replace(spec, rows_loss=solved(rates, "rows_loss", LOSS_BOUNDS, PRODUCT, *cases).rows_loss)
    return _with_row_rates(spec, found)


def _with_row_rates(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """Solves the achieved product rates of the measured types.

    The kernel rates of other types with the same activation format change by the same factors.
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
        factors[kind][2] = math.sqrt(factors[kind][1] * factors[kind][3])  # geometric mean of both neighbours
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
    """Loads a model on all ranks and yields it with its cost model. A collective call.

    Other ranks first run rank 0's steps, until rank 0 closes the model.
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
    """Measures steps. Decode steps read their weights from memory, because other bytes are read before them."""
    count = lambda shape: max(0, int(EVICTED * cache_bytes() - cost.bytes_read(shape).always))
    turns = steps.measured([(shape, count(shape)) for shape in shapes], TURNS)
    return Measured(dict(zip(shapes, turns, strict=True)), cost)


def _near(steps: TracedSteps, cost: CostModel, shapes: Sequence[StepShape]) -> Measured:
    """Measures steps with nothing read between them."""
    turns = steps.measured([(shape, 0) for shape in shapes], TURNS)
    return Measured(dict(zip(shapes, turns, strict=True)), cost, evicted=False)


__all__ = ["Measured", "calibrated", "measured_steps", "solved"]
