"""The part of a machine's figures that kernels alone do not show: what memory, products, attention and row steps reach
inside of whole steps, from the steps of models that are made up here and are in no catalogue.

Threads write when they begin and end each step, so each figure is solved for by the seconds of what depends on it: what
else is wrong in the model, or slow at that moment, does not go into it.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckdist import native
from ckdist.cli.traced_steps import Groups, OtherBytes, TracedSteps
from ckdist.comm.protocol import World
from ckdist.config.engine import EngineConfig
from ckdist.engine.launch import Model, load_model
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import ATTENTION, EXPERTS, HEADS, OTHERS, PRODUCT, CostModel
from ckdist.planning.machine import PRODUCT_ROWS, MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.planning.step_shape import StepShape
from ckdist.program.batch import BLOCK_TOKENS
from ckdist.topology import this_machine
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.safetensors_writer import TensorToWrite, as_stored, write_safetensors

COMMON = {"vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
DENSE = {
    **COMMON, "model_type": "llama", "hidden_size": 1280, "intermediate_size": 3840, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 96, "num_hidden_layers": 6,
}  # fmt: skip
LATENT = {
    **COMMON, "model_type": "deepseek_v3", "hidden_size": 1280, "intermediate_size": 2560, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 4, "first_k_dense_replace": 4, "kv_lora_rank": 384,
    "q_lora_rank": 512, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 96, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MIXTURE = DENSE | {
    "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 640, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
BYTE_TYPES = "Q8_0", "Q4_K"
SMALL = DENSE | {"num_hidden_layers": 1}
GROUPED = SMALL | {"num_key_value_heads": 2}  # whose heads share keys and values otherwise
TYPES = {"plain": None, "Q8_0": "q8_0", "Q4_K": "q4_k"}  # how dense models are quantised
SAME = {"plain": 1, "Q8_0": 2, "Q4_K": 4}  # layers with which these types have as many bytes
DEPTHS = "same", "dense", "deep"  # of dense models, whose weights are read again after so many others of their own
FAR = "Q4_K"  # of which the deep model's caches are read too
SHORT, LONG = 32, 1024  # tokens of context
FEW, SOME, MANY = 4, 64, 512  # rows of products: of sequences that are decoded together, and of prompts
ALONE, BEHIND = StepShape.decode(1, SHORT), StepShape.decode(1, LONG)
TOGETHER, ALL_BEHIND = StepShape.decode(FEW, SHORT), StepShape.decode(FEW, LONG)
PROMPTED, PIECE = StepShape.prompt(MANY), StepShape.prompt(SOME)
# Models that are made up: their numbers, --quantize, and the steps that are measured of them.
MADE: Mapping[str, tuple[Mapping[str, Any], str | None, tuple[StepShape, ...]]] = {
    "plain": (DENSE, None, (ALONE, PIECE, PROMPTED)),
    "Q8_0": (DENSE, "q8_0", (ALONE, PIECE, PROMPTED)),
    "Q4_K": (DENSE, "q4_k", (ALONE, PIECE, PROMPTED)),
    "latent": (LATENT, None, (PROMPTED,)),
    "latent Q8_0": (LATENT, "q8_0", (PROMPTED,)),
    "mixture": (MIXTURE, "q4_k", (ALONE, PROMPTED)),
}
FOLDERS = {
    "dense": DENSE, "latent": LATENT, "mixture": MIXTURE, "small": SMALL, "grouped": GROUPED,
    **{f"{layers} layers": DENSE | {"num_hidden_layers": layers} for layers in SAME.values()},
}  # fmt: skip
# What is measured with nothing read in between, of models of MADE or of folders, and of all DEPTHS.
NEAR_STEPS = {
    **dict.fromkeys(("small", "latent"), (ALONE, TOGETHER, BEHIND)), "grouped": (BEHIND,),
    **dict.fromkeys(("mixture", "latent Q8_0"), (ALONE, TOGETHER)),
    **{f"{name} {depth}": (ALONE, TOGETHER) for name in TYPES for depth in DEPTHS},
    f"{FAR} deep": (ALONE, TOGETHER, BEHIND, ALL_BEHIND),
}  # fmt: skip
TURNS = 3
MOST_FACTOR = 4.0  # that products in steps are faster or slower than alone
# From all of the shorter part hidden to reading and computing by turns; and then around the best of these.
LOSSES, FINER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), tuple(0.02 * step for step in range(-9, 10))
LOSS_BOUNDS = 0.01, 4.0  # of products of several rows
HALVINGS = 15  # of the logarithms of bounds, by which a figure is found
LEAST_SECONDS = 1e-9  # that a group of steps counts as
ROUNDS = 4  # in which figures that depend on each other are found
ONCE = 1e-9, 1e-4  # bounds of seconds of one head,
SHARES = 0.02, 4.0  # of parts of rates,
RATES = 1e7, 1e13  # bounds of operations per second, and of bytes
LEAST_ACHIEVED = 0.01  # of memory's bandwidth
MOST_REUSE, MOST_BYTES = 20.0, 1e16  # times faster than memory at most; more bytes than any model has
EVICTED = 1.5  # so many times the machine's caches is read from one use of a weight to the next, if it is from memory
LEAST_LAYERS, MOST_LAYERS = 8, 32  # of the deep model, whose weights are that many bytes if its layers allow it
NEAR = " near"  # of a model's name: nothing is read between its steps

IN_MEMORY, ROOM = pathlib.Path("/dev/shm"), 3 << 30  # noqa: S108, a file system in memory; bytes that it has free

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


@contextlib.contextmanager
def made_models(world: World) -> Iterator[pathlib.Path]:
    """A folder with the models' files, in memory where there is room, for as long as the caller needs them; a
    collective call.
    """
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="ckdist-", dir=_memory()) if world.rank == 0 else None
        folder = stack.enter_context(temporary) if temporary is not None else None
        parent = pathlib.Path(world.broadcast(folder))
        if world.rank == 0:
            deep = DENSE | {"num_hidden_layers": deep_layers(_caches())}
            for name, config in {**FOLDERS, "deep": deep}.items():
                _write(parent / name, config)
        world.gather(None)  # the files are there
        yield parent
        world.gather(None)  # nobody reads them any more


def _memory() -> str | None:
    """A folder whose files lie in memory, if it has room for the models; None: where temporary files are."""
    try:
        return str(IN_MEMORY) if shutil.disk_usage(IN_MEMORY).free > ROOM else None
    except OSError:
        return None


def measured_steps(spec: MachineSpec, world: World, models: pathlib.Path) -> dict[str, Measured]:
    """The steps of the models of MADE, which lie in a folder, on all ranks, and those with nothing read in between
    (NEAR). On rank 0, a collective call.
    """
    others = OtherBytes(int(EVICTED * _caches()) if world.rank == 0 else 0)
    found: dict[str, Measured] = {}
    cases = [(name, _folder(config), quantize, shapes) for name, (config, quantize, shapes) in MADE.items()]
    cases += [("small", "small", None, ()), ("grouped", "grouped", None, ())]
    for name, kind in TYPES.items():
        of_depth = lambda depth, name=name: f"{SAME[name]} layers" if depth == "same" else depth
        cases += [(f"{name} {depth}", of_depth(depth), kind, ()) for depth in DEPTHS]
    try:
        for name, folder, quantize, shapes in cases:
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


def _folder(config: Mapping[str, Any]) -> str:
    """Where a model's files are."""
    return next(name for name, each in FOLDERS.items() if each is config)


def deep_layers(caches: float) -> int:
    """Layers of the deep model, which leave nothing of it in caches of so many bytes."""
    each = sum(math.prod(shape) for name, shape in _shapes(SMALL).items() if "layers" in name)
    return int(np.clip(math.ceil(EVICTED * caches / (2 * each)), LEAST_LAYERS, MOST_LAYERS))


def calibrated(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with what whole steps reach of its bandwidth, products, attention and elementwise rate."""
    plain, latent, mixture = (found[name] for name in ("plain", "latent", "mixture"))
    spec = dataclasses.replace(spec, reuse=())
    spec = solved(spec, "elementwise", (1e6, 1e11), OTHERS, (plain, PROMPTED))
    spec = _with_products(_between_steps(_with_reading(spec, found), found), found)
    spec = solved(spec, "attention", RATES, ATTENTION, (plain, PROMPTED))
    spec = solved(spec, "latent", RATES, ATTENTION, (latent, PROMPTED))
    spec = solved(spec, "heads", RATES, HEADS, (latent, PROMPTED))
    spec = solved(spec, "heads_int8", RATES, HEADS, (found["latent Q8_0"], PROMPTED))
    heads = ((found[name + NEAR], shape) for name in ("latent", "latent Q8_0") for shape in (ALONE, TOGETHER))
    spec = solved(spec, "heads_once", ONCE, HEADS, *heads, beside=PRODUCT)
    spec = solved(spec, "achieved_experts", SHARES, EXPERTS, (mixture, PROMPTED))
    near = ((found["mixture" + NEAR], shape) for shape in (ALONE, TOGETHER))
    spec = solved(spec, "experts_read", SHARES, EXPERTS, (mixture, ALONE), *near)
    return _with_single_tokens(spec, found)


def _with_single_tokens(spec: MachineSpec, found: Mapping[str, Measured]) -> MachineSpec:
    """The machine with what attention of single tokens reaches: what each costs by short contexts, how fast caches are
    read by a model of many layers and by one of a single layer, and computing by one whose heads share keys and values.
    """
    small, grouped, latent = (found[name + NEAR] for name in ("small", "grouped", "latent"))
    deep = found[f"{FAR} deep{NEAR}"]
    for _ in range(ROUNDS):
        spec = solved(spec, "attention_given", RATES, ATTENTION, (small, ALONE), (small, TOGETHER))
        read = (small, BEHIND), (deep, BEHIND), (deep, ALL_BEHIND)
        spec = solved(spec, "attention_read", SHARES, ATTENTION, *read)
        spec = solved(spec, "attention_one", RATES, ATTENTION, (grouped, BEHIND))
        spec = solved(spec, "latent_given", RATES, ATTENTION, (latent, ALONE), (latent, TOGETHER))
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
            bounds = alone / MOST_FACTOR, alone * MOST_FACTOR
            one = found[f"{name} same{NEAR}" if shape is TOGETHER else name]
            factors[kind][index] = solved(spec, times, bounds, PRODUCT, (one, shape)).products[kind][index] / alone
        factors[kind][2] = math.sqrt(factors[kind][1] * factors[kind][3])  # of rows between those
    of_bytes = zip(*(factors[kind] for kind in BYTE_TYPES), strict=True)
    mean = [math.prod(each) ** (1 / len(each)) for each in of_bytes]
    products = {}
    for kind, alone in spec.products.items():
        form = native.lib.ckdist_activation_format(native.ffi.NULL, dtypes.BY_NAME[kind].number)
        each = factors.get(kind, (None, factors["BF16"], mean)[form] or [1.0] * len(PRODUCT_ROWS))
        products[kind] = tuple(rate * factor for rate, factor in zip(alone, each, strict=True))
    return dataclasses.replace(spec, products=products)


def _caches() -> int:
    """Bytes of the machine's last caches, as far as memory has room for what is to leave them."""
    machine = this_machine()
    caches = len({cpu.l3 for cpu in machine.cpus}) * machine.l3_bytes
    return min(caches, native.lib.ckdist_available_memory() // 16)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all weights of a model."""
    return weight_shapes(spec_from_config(config, "the calibration's model"))


def _write(folder: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
    """A folder with a model of random weights in bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = list(_stored(config, _shapes(config)))
    most = max(math.prod(shape) for _, shape in stored)
    drawn = as_stored(0.02 * np.random.default_rng(0).standard_normal(most, np.float32), "BF16")  # (elements,)
    values = lambda shape: lambda: drawn[: math.prod(shape)].reshape(shape)
    tensors: Iterator[TensorToWrite] = (TensorToWrite(name, "BF16", shape, values(shape)) for name, shape in stored)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _stored(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a file's tensors: of latent attention keys and values of a head are stored together."""
    for name, shape in shapes.items():
        if name.endswith("k_b_proj.weight"):
            keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
            rows = config["num_attention_heads"] * (keys + values)
            yield name.replace("k_b_proj", "kv_b_proj"), (rows, config["kv_lora_rank"])
        elif not name.endswith("v_b_proj.weight"):
            yield name, shape


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
    count = lambda shape: max(0, int(EVICTED * _caches() - cost.bytes_read(shape).always))
    turns = steps.measured([(shape, count(shape)) for shape in shapes], TURNS)
    return Measured(dict(zip(shapes, turns, strict=True)), cost)


def _near(steps: TracedSteps, cost: CostModel, shapes: Sequence[StepShape]) -> Measured:
    """Steps of some shapes, with nothing read between them."""
    turns = steps.measured([(shape, 0) for shape in shapes], TURNS)
    return Measured(dict(zip(shapes, turns, strict=True)), cost, evicted=False)


__all__ = ["Measured", "calibrated", "made_models", "measured_steps", "solved"]
