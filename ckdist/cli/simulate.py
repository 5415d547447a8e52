"""`ckdist simulate`: serves requests in simulated time with the real scheduler."""

import json
import logging
import math
import os

import numpy as np

from ckdist.cli.frozen_import import without_collections
from ckdist.cli.main import launched_rank
from ckdist.cli.plan import open_machine, open_model, question_of
from ckdist.config.plan_config import PlanConfig
from ckdist.config.simulate_config import SimulateConfig
from ckdist.errors import CapacityError, ConfigError
from ckdist.figure import check_path
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.plan.compare import answer, answers
from ckdist.plan.fleet import ClosedLoop, Fleet, simulate_clients, simulate_requests
from ckdist.plan.lengths import Lengths, parse_lengths
from ckdist.plan.load import RequestKind, Requests, poisson, read_trace
from ckdist.plan.observed import Observed
from ckdist.plan.predict import PredictedStepCost, Predictor, Question, Way
from ckdist.plan.replica import ServerShape
from ckdist.plan.serving_report import Objective, lines, report
from ckdist.plan.simulation_plot import draw
from ckdist.plan.step_cost import StepCost, StepTotals, linear_step_cost, read_step_cost

log = logging.getLogger(__name__)
MOST_FAILURES = 1_000_000
MOST_STEPS = 1e10  # of clients, which send requests as fast as they are answered


@without_collections()
def cost_of(config: SimulateConfig) -> tuple[StepCost, int]:
    """Returns the cost of steps, and the stages of a replica.

    Raises:
        ConfigError: --steps, the model or the machine cannot be used.
        CapacityError: The model does not fit.
    """
    if config.steps is not None:
        return read_step_cost(config.steps), config.pipeline_parallel_size
    question = asked(config)
    if config.pipeline_parallel_size > 1:
        best = answer(question, Way("stages", stages=config.pipeline_parallel_size))
    else:
        best = next(one for one in answers(question) if one.way.replicas == 1)
    if not best.fits:
        needed, room = gigabytes(best.largest.total), gigabytes(question.cluster.rank_memory)
        raise CapacityError(
            f"{config.parallel} sequences of {config.ctx_size} tokens need {needed} on a rank, which has {room}: "
            "give more --hosts-per-replica, or a smaller --parallel, --ctx-size or --type"
        )
    log.info("steps as predicted: %s", best.way)
    predicted = PredictedStepCost(Predictor(question, best.way))
    cost = linear_step_cost(predicted, config.ubatch_size, config.parallel, config.ctx_size)
    return cost, best.way.stages


def asked(config: SimulateConfig) -> Question:
    """Returns the question of `ckdist plan` about one replica."""
    plan = PlanConfig(
        model=config.model, machine=(config.machine or "this",), type=config.type, hosts=config.hosts_per_replica,
        context=config.ctx_size, sequences=config.parallel, ubatch_size=config.ubatch_size,
    )  # fmt: skip
    return question_of(plan, open_model(plan), open_machine(plan.machine[0]))


def fleet_of(config: SimulateConfig) -> Fleet:
    """Returns the replicas to simulate.

    Raises:
        ConfigError: As in `cost_of`, or too many failures would be simulated.
        CapacityError: The model does not fit.
    """
    cost, stages = cost_of(config)
    server = ServerShape(
        max_tokens=config.ubatch_size,
        max_sequences=config.parallel,
        context=config.ctx_size,
        cache_tokens=config.cache_tokens or config.parallel * config.ctx_size,
        max_waiting=config.max_queue + config.parallel,
        max_step_seconds=config.max_step_ms / 1000 or math.inf,
        stages=stages,
        stage_hop=config.stage_hop,
        front_end=config.front_end,
    )
    replicas, each = config.hosts // config.hosts_per_replica, config.hosts_per_replica
    mtbf = math.inf if config.host_mtbf is None else config.host_mtbf * 3600 / each
    failures = replicas * config.duration / (mtbf + config.restart)
    if failures > MOST_FAILURES:
        raise ConfigError(
            f"replicas would fail {failures:.2g} times, and at most {MOST_FAILURES} failures can be simulated: "
            "use a longer --host-mtbf"
        )
    jobs = config.jobs or len(os.sched_getaffinity(0))
    return Fleet(replicas, server, cost, config.router, mtbf, config.restart, config.sample, config.seed, jobs)


def load_of(config: SimulateConfig) -> Requests | ClosedLoop:
    """Returns the requests, or the clients that send them. Raises ConfigError if a flag or the trace cannot be used."""
    if config.trace is not None:
        return read_trace(config.trace, config.duration)
    prompt, output = (_lengths(f"--{name}-tokens", getattr(config, f"{name}_tokens")) for name in ("prompt", "output"))
    kind = RequestKind(prompt, output, config.prefix_tokens, config.prefixes)
    if config.clients is not None:
        return ClosedLoop(config.clients, kind, config.think)
    assert config.rate is not None  # as the configuration has checked
    return poisson(np.random.default_rng([config.seed, 0]), kind, config.rate, config.duration)


def simulate(config: SimulateConfig, load: Requests | ClosedLoop, fleet: Fleet) -> tuple[Observed, float]:
    """Simulates the load. Returns the observations, and the seconds in which requests arrive."""
    if isinstance(load, ClosedLoop):
        steps = fleet.simulated * config.duration / fleet.cost.seconds(StepTotals(decodes=1, outputs=1))
        if steps > MOST_STEPS:
            raise ConfigError(
                f"--clients for --duration {config.duration:g} may take {steps:.2g} steps, and at most "
                f"{MOST_STEPS:.0e} can be simulated: use a shorter --duration, or --sample"
            )
        return simulate_clients(fleet, load, config.duration), config.duration
    seconds = min(config.duration, float(load.arrival[-1])) if config.trace is not None else config.duration
    return simulate_requests(fleet, load, seconds), seconds


def _lengths(flag: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text[:60]!r} {error}") from None


def run(config: SimulateConfig) -> int:
    """Prints the report, or one JSON object. Returns 0."""
    if launched_rank():
        return 0
    if config.plot is not None:
        check_path(config.plot)  # fails before the simulation
    objective = Objective(config.first_token, config.per_token)
    load, fleet = load_of(config), fleet_of(config)
    seen, seconds = simulate(config, load, fleet)
    found = report(seen, fleet, seconds, objective)
    print(json.dumps(found, indent=1) if config.json else "\n".join(lines(found, objective)))
    if config.plot is not None:
        draw(seen, objective, config.plot)
    return 0
