"""Predicts speed and memory of a model on a described cluster, for one way to divide it.

Programs are traced and lowered as for a real start, for the first rank of each stage, which has the largest share. No
tensor is allocated, and only the headers of the model's files are read. `ckdist.plan.cost` predicts the seconds.
"""

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ckdist import native
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.stage_work import stage_costs, stage_work
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, Layout
from ckdist.layouts.phase_layouts import layouts_for
from ckdist.layouts.stage_plan import check_stages, divide_layers
from ckdist.mesh import Mesh
from ckdist.models.decoder import main_forward
from ckdist.plan.cluster import Cluster, PlannedWorld
from ckdist.plan.cost import CostModel, RankPlace, Times
from ckdist.plan.rank_memory import RankMemory, Wanted, rank_memory
from ckdist.plan.step_cost import StepTotals
from ckdist.plan.step_shape import Chunks, StepShape
from ckdist.program.lower import ServingLowering, stored_dims
from ckdist.program.lowered import Lowered
from ckdist.program.pipeline_stage import Stage
from ckdist.program.program import Program
from ckdist.program.tracer import trace
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.loader import planned_type
from ckdist.weights.packed_type import WeightCost, cost_of_type

KEPT_STEPS = 1 << 14  # number of step shapes whose times are cached
T = TypeVar("T")
CHUNKS_SAMPLED = 17  # priced chunks of a long prompt; between these, time is linear in the context


@dataclass(frozen=True)
class Way:
    """A way to divide a model over a cluster."""

    name: str
    replicas: int = 1  # groups of hosts with a whole model each
    stages: int = 1  # pipeline stages of a replica
    prefill: str = "tensor"  # as --prefill
    experts: str = "tensor"  # as --experts

    def __str__(self) -> str:
        more = {"replicas": self.replicas, "stages": self.stages}
        numbers = [f"{count} {name}" for name, count in more.items() if count > 1]
        return f"{self.name} ({', '.join(numbers)})" if numbers else self.name


@dataclass(frozen=True)
class Question:
    """A model and its load on a cluster: `sequences` of `context` tokens each.

    Layouts are ordered by the time of a prompt of `prompt` tokens and of `generated` tokens, or of one of both.
    """

    checkpoint: Checkpoint
    cluster: Cluster
    context: int
    sequences: int = 1
    prompt: int = 2048
    ubatch_size: int = 512  # most tokens of a step
    quantize: str | None = None  # as --quantize
    cache: tuple[str, str] = ("i16", "i16")  # types of keys and values
    generated: int = 256
    objective: str = "total"  # or decode, or prefill
    report: Callable[[str], object] = field(default=len, compare=False, repr=False)  # called with each finished layout
    made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # programs, traced once

    def on(self, cluster: Cluster) -> "Question":
        """The same question for another cluster."""
        return replace(self, cluster=cluster)


@dataclass(frozen=True)
class Rate:
    """A predicted speed."""

    tokens: float  # tokens per second of the whole cluster
    seconds: float  # of one step or prompt
    times: Times  # the parts of `seconds`
    seen: tuple[float, float]  # the smallest and the largest measured speed over its prediction

    @property
    def low(self) -> float:
        """The least tokens per second, if this prediction is as wrong as any that was checked."""
        return self.tokens * self.seen[0]

    @property
    def high(self) -> float:
        """The most tokens per second, likewise."""
        return self.tokens * self.seen[1]

    @property
    def bound(self) -> str:
        """The resource that takes most of the time."""
        return self.times.bound


@dataclass(frozen=True)
class StageModel:
    """The first rank of a stage."""

    programs: list[Program]  # decode's first
    costs: list[CostModel]  # for each program
    mesh: Mesh

    def step(self, shape: StepShape) -> Times:
        """The times of a step: of the faster program for a step with prompts, else of decode's program."""
        prompts = shape.tokens > shape.sequences
        return min((cost.step(shape) for cost in (self.costs if prompts else self.costs[:1])), key=lambda t: t.total)


class Predictor:
    """Predicts a model on a cluster, divided in one way. Raises ConfigError if the way is not possible."""

    def __init__(self, question: Question, way: Way) -> None:
        self.question, self.way = question, way
        self.checkpoint, self.cluster = question.checkpoint, question.cluster
        cluster = self.cluster
        if cluster.hosts % way.replicas or (cluster.size // way.replicas) % way.stages:
            raise ConfigError(
                f"{cluster.hosts} hosts of {cluster.local_size} ranks cannot be {way.replicas} replicas of "
                f"{way.stages} stages: give a multiple of both"
            )
        self.packed = functools.cache(self._packed)
        self.weight = functools.cache(self._weight)
        self.stages = [self._stage(*stage) for stage in self._divided()]
        works = [stage_work(s.programs[0], s.mesh, self.weight, cluster.machine.isa) for s in self.stages]
        self.costs = stage_costs(works)
        self.stage_times = functools.lru_cache(maxsize=KEPT_STEPS)(self._stage_times)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which is kept for this key."""
        made = self.question.made
        if key not in made:
            made[key] = make()
        return made[key]

    def _traced(self, layout: Layout, mesh: Mesh, stage: Stage) -> Program:
        """The program of a stage."""
        spec, key = self.checkpoint.spec, (*sorted(layout.sharded_by.items()), *mesh.axes.items(), mesh.rank)
        whole = self._once(key, lambda: trace(main_forward(spec), spec, layout, mesh))
        return self._once((*key, stage), lambda: stage.program(whole, mesh))

    def _packed(self, name: str) -> int:
        """The ggml number of the type that a matrix is packed in."""
        return planned_type(name, self.checkpoint.tensors[name], self.question.quantize)

    def _weight(self, name: str) -> WeightCost:
        """The cost of a matrix per element."""
        return cost_of_type(self.packed(name), self.cluster.machine.isa)

    def _divided(self) -> Iterator[tuple[Stage, list[RankPlace]]]:
        """(stage, places of its ranks) for the first replica."""
        spec, count = self.checkpoint.spec, self.way.stages
        places = self.cluster.places()[: self.cluster.size // self.way.replicas]
        each = len(places) // count
        check_stages(count, len(places), len(spec.layers))
        layers = [(0, len(spec.layers))]
        if count > 1:
            isa, single = self.cluster.machine.isa, Stage(0, 1, layers[0])
            layers = self._once(
                (count, isa, self.question.quantize),
                lambda: divide_layers(self._traced(SINGLE, Mesh(), single), count, isa, self.weight),
            )
        for number, own in enumerate(layers):
            yield Stage(number, count, own), places[number * each : (number + 1) * each]

    def _stage(self, stage: Stage, places: list[RankPlace]) -> StageModel:
        """The model of a stage's first rank, with programs as `ckdist.engine.stage_programs` traces them."""
        spec, hosts = self.checkpoint.spec, len({place.host for place in places})
        config = EngineConfig(
            prefill=self.way.prefill, experts=self.way.experts, pipeline_parallel_size=stage.count,
            ubatch_size=self.question.ubatch_size,
        )  # fmt: skip
        world = PlannedWorld(hosts, len(places) // hosts)
        prefill, decode, mesh = layouts_for(config, world, spec, self.cluster.machine.link)
        layouts = [decode] if prefill is decode else [decode, prefill]
        programs = [self._traced(layout, mesh, stage) for layout in layouts]
        costs = [CostModel(p, mesh, places, self.cluster.machine, self.weight, self.question.cache) for p in programs]
        return StageModel(programs, costs, mesh)

    # Time

    def _hop(self, tokens: int, number: int) -> Times:
        """The times to send `tokens` rows from stage `number` to the next one; zero after the last stage."""
        if number == len(self.stages) - 1:
            return Times()
        places = self.cluster.places()
        each = self.cluster.size // self.way.replicas // len(self.stages)
        here, there = places[number * each], places[(number + 1) * each]
        count, machine = 4.0 * tokens * self.checkpoint.spec.hidden_size, self.cluster.machine
        if here.host != there.host:
            return Times(link=machine.link.message(count))
        return Times(exchange=machine.barrier_seconds(2) + count / machine.rank_rate)

    def _stage_times(self, shape: StepShape) -> tuple[Times, ...]:
        """The times of a step in each stage, with the transfer to the next stage."""
        return tuple(
            stage.step(shape).plus(self._hop(shape.tokens, number)) for number, stage in enumerate(self.stages)
        )

    def step(self, shape: StepShape) -> Times:
        """The times of one step of a replica through all stages."""
        times = Times()
        for each in self.stage_times(shape):
            times = times.plus(each)
        return times

    def seconds(self, shape: StepShape) -> float:
        """The seconds of one step of a replica through all stages."""
        return self.step(shape).total

    def interval(self, shape: StepShape) -> float:
        """Seconds between the ends of two steps if the pipeline is full: those of the slowest stage."""
        return max(times.total for times in self.stage_times(shape))

    def decode(self, sequences: int, context: int) -> Rate:
        """The decode speed of `sequences` sequences on the whole cluster, after `context` tokens of context each."""
        each = -(-sequences // self.way.replicas)
        batches = self.costs.groups(each)
        shape = StepShape.decode(-(-each // batches), context)
        seconds = max(self.seconds(shape), batches * self.interval(shape))
        return Rate(sequences / seconds, seconds, self.step(shape), self.cluster.machine.seen("decode"))

    def prefill(self, tokens: int, context: int = 0, prompts: int = 1) -> Rate:
        """The speed of prompts of `tokens` tokens, after `context` tokens of context each. `seconds`: of one prompt."""
        pieces = self.costs.pieces(self.costs.work(context, context + tokens))
        piece = min(self.question.ubatch_size, -(-tokens // pieces))
        sizes = [piece] * (tokens // piece) + [tokens % piece]
        whole, rest = len(sizes) - 1, sizes[-1]
        shapes = [(StepShape.prompt(rest, context + tokens - rest), 1.0)] if rest else []
        samples = min(whole, CHUNKS_SAMPLED)
        for i in range(samples):
            at = (i + 0.5) * whole / samples if samples < whole else i
            shapes.append((StepShape.prompt(piece, context + int(at * piece)), whole / samples))
        times, slowest = Times(), 0.0
        for shape, count in shapes:
            times = times.plus(self.step(shape), count)
            slowest += count * self.interval(shape)
        first = self.seconds(shapes[-1][0]) - self.interval(shapes[-1][0])  # time to fill the pipeline
        seconds = slowest + first
        replicas = min(prompts, self.way.replicas)
        return Rate(replicas * tokens / seconds, seconds, times, self.cluster.machine.seen("prefill"))

    # Memory

    @functools.cached_property
    def lowered(self) -> list[list[tuple[Program, Lowered]]]:
        """The programs of each stage, with their lowered forms."""
        return [self._lowered(stage) for stage in self.stages]

    def _lowered(self, stage: StageModel) -> list[tuple[Program, Lowered]]:
        first, found = stage.programs[0], []
        for program in stage.programs:
            # programs are kept, so their ids stay theirs
            key = id(program), id(first), self.cluster.machine.isa, self.question.quantize, self.question.ubatch_size
            lowered = self._once(key, functools.partial(self._lower, program, first, stage.mesh))
            found.append((program, lowered))
        return found

    def _lower(self, program: Program, first: Program, mesh: Mesh) -> Lowered:
        return ServingLowering(
            program,
            mesh,
            formats=lambda name: self.weight(name).form,
            block_columns=lambda name: native.lib.ckdist_type_undivided_columns(self.packed(name)),
            max_tokens=self.question.ubatch_size,
            stored=None if program is first else stored_dims(program, first),
        ).run()

    def memory(self, context: int, sequences: int) -> list[RankMemory]:
        """Memory of the first rank of each stage, with caches for `sequences` sequences of the whole cluster."""
        each = -(-sequences // self.way.replicas)
        wanted = Wanted(context, each, self.question.cache)
        return [
            rank_memory(self.checkpoint.spec, plans, self.packed, wanted, stage.costs[0].own.threads)
            for stage, plans in zip(self.stages, self.lowered, strict=True)
        ]


@dataclass(frozen=True)
class PredictedStepCost:
    """A predicted `StepCost` for simulations: of a step with the mean prompt and the mean sequence."""

    predictor: Predictor

    def seconds(self, step: StepTotals, /) -> float:
        """Seconds of the step."""
        chunks = []
        if step.prompt_tokens:
            before = step.prompt_attended / step.prompt_tokens - step.prompt_tokens / 2
            chunks.append(Chunks(1, step.prompt_tokens, max(0, round(before))))
        if step.decodes:
            chunks.append(Chunks(step.decodes, 1, round(step.decode_context / step.decodes)))
        return self.predictor.seconds(StepShape(tuple(chunks), max(1, step.outputs))) if chunks else 0.0


def ways_for(cluster: Cluster, layers: int, mixture: bool) -> list[Way]:
    """The possible ways to divide a model over a cluster, the simplest first. `mixture`: it has experts."""
    ways = [Way("tensor")]
    if cluster.size > 1:
        ways.append(Way("token", prefill="token"))
    counts = [cluster.hosts] if cluster.hosts > 1 else [cluster.local_size]
    ways += [Way("stages", stages=count) for count in counts if 1 < count <= layers]
    if cluster.hosts > 1:
        if mixture:
            ways.append(Way("experts", experts="expert"))
        ways.append(Way("data", replicas=cluster.hosts))
    return ways
