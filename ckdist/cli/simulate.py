"""`ckdist simulate`: requests served in simulated time, by the real scheduler."""

import json
import math
import os

import numpy as np

from ckdist.cli.main import launched_rank
from ckdist.config import SimulateConfig
from ckdist.errors import ConfigError
from ckdist.planning.step_cost import read_step_cost
from ckdist.simulate.fleet import ClosedLoop, Fleet, simulate_clients, simulate_requests
from ckdist.simulate.lengths import Lengths, parse_lengths
from ckdist.simulate.load import RequestKind, poisson, read_trace
from ckdist.simulate.observed import Observed
from ckdist.simulate.plot import draw, figure_class
from ckdist.simulate.replica import ServerShape
from ckdist.simulate.report import Objective, lines, report


def fleet_of(config: SimulateConfig) -> Fleet:
    """The replicas that are asked for. ConfigError where --steps cannot be used."""
    assert config.steps is not None  # as the configuration has checked
    replicas = config.hosts // config.hosts_per_replica
    server = ServerShape(
        max_tokens=config.ubatch_size,
        max_sequences=config.parallel,
        context=config.ctx_size,
        cache_tokens=config.cache_tokens or config.parallel * config.ctx_size,
        max_waiting=config.max_queue + config.parallel,
        stages=config.pipeline_parallel_size,
        stage_hop=config.stage_hop,
        front_end=config.front_end,
    )
    mtbf = math.inf if config.host_mtbf is None else config.host_mtbf * 3600 / config.hosts_per_replica
    jobs = config.jobs or len(os.sched_getaffinity(0))
    cost = read_step_cost(config.steps)
    return Fleet(replicas, server, cost, config.router, mtbf, config.restart, config.sample, config.seed, jobs)


def simulate(config: SimulateConfig, fleet: Fleet) -> tuple[Observed, float]:
    """What becomes of the load that is asked for, and the seconds in which it arrives."""
    if config.trace is not None:
        requests = read_trace(config.trace, config.duration)
        seconds = min(config.duration, float(requests.arrival[-1]))
        return simulate_requests(fleet, requests, seconds), seconds
    kind = RequestKind(
        _lengths("--prompt-tokens", config.prompt_tokens),
        _lengths("--output-tokens", config.output_tokens),
        config.prefix_tokens,
        config.prefixes,
    )
    if config.clients is not None:
        loop = ClosedLoop(config.clients, kind, config.think)
        return simulate_clients(fleet, loop, config.duration), config.duration
    assert config.rate is not None  # as the configuration has checked
    requests = poisson(np.random.default_rng([config.seed, 0]), kind, config.rate, config.duration)
    return simulate_requests(fleet, requests, config.duration), config.duration


def _lengths(flag: str, text: str) -> Lengths:
    """The distribution of a flag. ConfigError."""
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text[:60]!r} {error}") from None


def run(config: SimulateConfig) -> int:
    """Prints the report, or one JSON object; 0."""
    if launched_rank():
        return 0
    if config.plot is not None:
        figure_class()  # before minutes are spent
    objective = Objective(config.first_token, config.per_token)
    fleet = fleet_of(config)
    seen, seconds = simulate(config, fleet)
    found = report(seen, fleet, seconds, objective)
    print(json.dumps(found, indent=1) if config.json else "\n".join(lines(found, objective)))
    if config.plot is not None:
        draw(seen, objective, config.plot)
    return 0
