"""The figures of this machine for plans: measured once and cached, or saved by `ckdist bench machine --save`.

This module adds to `ckdist.planning.machine_speed` the rates between ranks, if there are several, and the overhead of a
step, measured with the bundled model.
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
from ckdist.comm.transports.link import measured_link
from ckdist.comm.world import SingleWorld
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.start_up import BUNDLED, load_model
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine_spec import MachineSpec, kept_machine, kept_path, machine_of, tomllib
from ckdist.planning.machine_speed import machine_title, measure_machine
from ckdist.planning.predict import Predictor, Way
from ckdist.planning.step_shape import StepShape
from ckdist.topology import this_machine
from ckdist.weights.checkpoint import open_checkpoint

log = logging.getLogger(__name__)

STEPS, CONTEXT = 48, 64  # decode steps of the bundled model, and tokens before them
TURNS = 5
SMALL, LARGE = 1 << 10, 1 << 20  # floats of an all-reduce


def this_machine_spec() -> MachineSpec:
    """Returns the stored figures of this host. If there are none, measures and stores them."""
    known = kept_machine(machine_title(this_machine()), native.isa())
    if known is not None:
        return known
    log.info("measuring this machine once; `ckdist bench machine --save FILE` measures it again")
    spec = measured(SingleWorld())
    assert spec is not None  # on rank 0
    path = kept_path()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(spec.toml(), encoding="utf-8")
        except OSError as error:
            log.warning("cannot store the measured figures in %s: %s", path, error.strerror)
    return spec


def measured(world: World) -> MachineSpec | None:
    """Measures this machine. A collective call that returns None except on rank 0."""
    spec = kernels_measured(world)
    with made_models(world) as models:
        steps = measured_steps(spec, world, models)
    found = with_training(calibrated(spec, steps) if world.rank == 0 else spec, world)
    return found if world.rank == 0 else None


def kernels_measured(world: World) -> MachineSpec:
    """Measures this machine without whole steps. A collective call.

    Other ranks wait for rank 0, then take part in the exchange.
    """
    text = None
    if world.rank == 0:
        text = with_steps(measure_machine(this_machine(), lambda what: log.debug("measuring %s", what))).toml()
    return with_exchange(machine_of(tomllib.loads(str(world.broadcast(text))), "this machine"), world)


def with_exchange(spec: MachineSpec, world: World) -> MachineSpec:
    """Adds the measured rates between ranks, if there are several. A collective call."""
    return dataclasses.replace(spec, **world.broadcast(measured_exchange(world))) if world.size > 1 else spec


def with_steps(spec: MachineSpec) -> MachineSpec:
    """Adds the seconds between two steps, and of a barrier, from decoding with the bundled model.

    barrier = (measured step - predicted step without barriers) / barriers of a step.
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
    """Measures the ranks of a host, and the link if there are several hosts. A collective call."""
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
    small = min(small, large / 2)  # a small message takes less on a quiet machine
    rate = 4.0 * (LARGE - SMALL) / (large - small)  # bytes/s that a rank reads from each other rank
    return found | {"rank_seconds": small, "rank_core_rate": rate, "rank_rate": max(rate, 5e10)}


__all__ = ["kernels_measured", "measured", "this_machine_spec", "with_exchange"]
