"""This machine as plans know it: measured once, kept in the user's cache, and written by `ckdist bench machine --save`.

To what `ckdist.planning.machine_speed` measures are added what ranks exchange, where several were started, and what a
step costs beside its work, by the bundled model.
"""

import dataclasses
import logging
import time

import numpy as np

from ckdist import native
from ckdist.cli.bench_comm import Stopwatch
from ckdist.cli.calibration import calibrated, measured_steps
from ckdist.cli.made_models import made_models
from ckdist.cli.training_speed import with_training
from ckdist.comm.communicator import open_communicator
from ckdist.comm.protocol import World
from ckdist.comm.transports.link import measured_link
from ckdist.comm.world import SingleWorld
from ckdist.config.engine import EngineConfig
from ckdist.engine.launch import BUNDLED, load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine import MachineSpec, kept_machine, kept_path, machine_of, tomllib
from ckdist.planning.machine_speed import machine_title, measure_machine
from ckdist.planning.predict import Predictor, Way
from ckdist.planning.step_shape import StepShape
from ckdist.topology import this_machine
from ckdist.weights.checkpoint import open_checkpoint

log = logging.getLogger(__name__)

STEPS, CONTEXT = 48, 64  # that the bundled model decodes, and tokens before them
TURNS = 5
SMALL, LARGE = 1 << 10, 1 << 20  # floats that ranks add up


def this_machine_spec() -> MachineSpec:
    """Of this host: what was measured before, else it is measured now and kept."""
    known = kept_machine(machine_title(this_machine()), native.isa())
    if known is not None:
        return known
    log.info("this machine is measured, once; `ckdist bench machine --save FILE` does it again")
    spec = measured(SingleWorld())
    assert spec is not None  # on rank 0
    path = kept_path()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(spec.toml(), encoding="utf-8")
        except OSError as error:
            log.warning("what was measured cannot be kept in %s: %s", path, error.strerror)
    return spec


def measured(world: World) -> MachineSpec | None:
    """This machine, on rank 0; a collective call."""
    spec = kernels_measured(world)
    with made_models(world) as models:
        steps = measured_steps(spec, world, models)
    found = with_training(calibrated(spec, steps) if world.rank == 0 else spec, world)
    return found if world.rank == 0 else None


def kernels_measured(world: World) -> MachineSpec:
    """This machine without what whole steps reach of it; a collective call, in which the other ranks wait, and
    exchange.
    """
    text = None
    if world.rank == 0:
        text = with_steps(measure_machine(this_machine(), lambda what: log.debug("measuring %s", what))).toml()
    return with_exchange(machine_of(tomllib.loads(str(world.broadcast(text))), "this machine"), world)


def with_exchange(spec: MachineSpec, world: World) -> MachineSpec:
    """The machine with what these ranks exchange, if there are several; a collective call."""
    return dataclasses.replace(spec, **world.broadcast(measured_exchange(world))) if world.size > 1 else spec


def with_steps(spec: MachineSpec) -> MachineSpec:
    """The machine with the seconds between two steps, and of a barrier what a decoded token of the bundled model takes
    more than its work.
    """
    config = EngineConfig(ctx_size=512, parallel=1, repack="off", threads=spec.total_cores)
    model = load_model(config, SingleWorld())
    try:
        executable, ids = model.executable, np.zeros((STEPS, 1), np.int32)
        between, inside = [], []
        for _ in range(TURNS):
            sequence = LockstepSequences(executable, 1)
            sequence.fill(np.zeros(CONTEXT, np.int32))
            executable.stats(reset=True)
            began = time.perf_counter()
            for _logits in sequence.run(ids):
                pass
            took, stats = time.perf_counter() - began, executable.stats()
            inside.append(stats.total / stats.runs)
            between.append((took - stats.total) / stats.runs)
    finally:
        model.close()
    free = dataclasses.replace(spec, barrier=0.0, between=0.0)
    shape, waits = StepShape.decode(1, CONTEXT + STEPS // 2), dataclasses.replace(free, barrier=1e-6)
    checkpoint = open_checkpoint(BUNDLED)
    least, more = (Predictor(checkpoint, Cluster(m, ranks=1), Way("tensor")).seconds(shape) for m in (free, waits))
    count = (more - least) * 1e6  # barriers of a step
    barrier = max(spec.barrier, (min(inside) - least) / count) if count > 0.5 else 0.0
    return dataclasses.replace(spec, between=max(0.0, min(between)), barrier=barrier)


def measured_exchange(world: World) -> dict[str, float]:
    """Of the ranks of a host, and between hosts, where there are several; a collective call."""
    found = {}
    if len(set(world.hosts)) > 1:
        link = measured_link(world, "auto", 30.0)
        found = {"link_seconds": min(link.seconds, 10.0), "link_rate": link.rate}
    if world.local_size != world.size:
        return found
    communicator = open_communicator(world, arena_bytes=16 << 20)
    watch, times = Stopwatch(communicator), []
    for floats in (SMALL, LARGE):
        data = communicator.allocate((floats,))
        data[:] = 1.0
        times.append(min(watch.all_reduce(data, "float32") for _ in range(TURNS)))
    communicator.close()
    small, large = times
    small = min(small, large / 2)  # which a few numbers never take on a quiet machine
    rate = 4.0 * (LARGE - SMALL) / (large - small)  # what each rank reads of the others, of one summand each
    return found | {"rank_seconds": small, "rank_core_rate": rate, "rank_rate": max(rate, 5e10)}


__all__ = ["kernels_measured", "measured", "this_machine_spec", "with_exchange"]
