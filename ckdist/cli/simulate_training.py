"""`ckdist simulate-training`: simulates a training of any model over any hosts."""

import json
import math

from ckdist.cli.main import launched_rank
from ckdist.cli.plan import open_machine, open_model
from ckdist.config.plan_config import PlanConfig
from ckdist.config.simulate_training_config import SimulateTrainingConfig
from ckdist.figure import check_path
from ckdist.plan.machine_spec import MachineSpec
from ckdist.plan.simulated_training import Batches, TrainingCost, TrainingHost, TrainingMesh, operations_of
from ckdist.plan.simulation_plot import draw_training
from ckdist.plan.trained_model import trained_model
from ckdist.plan.training_report import training_lines, training_report


def host_of(machine: MachineSpec, disk: float) -> TrainingHost:
    """Returns a host that trains in bfloat16.

    Args:
        disk: Bytes/s that it writes.
    """
    return TrainingHost(
        operations_of(machine), machine.total_memory, machine.nodes * machine.bandwidth, machine.link, disk
    )


def cost_of(config: SimulateTrainingConfig) -> TrainingCost:
    """Returns the cost of the training. Raises ConfigError if the model, the machine or the mesh cannot be used."""
    asked = PlanConfig(model=config.model)
    mesh = TrainingMesh(
        config.data_parallel_size,
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
    )
    batches = Batches(config.batches or 4 * mesh.pp, config.batch_tokens, config.sequence_tokens)
    host = host_of(open_machine(config.machine), config.disk_rate)
    return TrainingCost(trained_model(open_model(asked).spec), host, mesh, batches)


def run(config: SimulateTrainingConfig) -> int:
    """Prints the report, or one JSON object. Returns 0."""
    if launched_rank():
        return 0
    if config.plot is not None:
        check_path(config.plot)  # fails before the simulation
    cost = cost_of(config)
    mtbf = math.inf if config.host_mtbf is None else 3600 * config.host_mtbf
    found = training_report(
        cost, config.spread, mtbf, config.restart, config.checkpoint_interval, config.days, config.seed
    )
    print(json.dumps(found, indent=1) if config.json else "\n".join(training_lines(found, cost)))
    if config.plot is not None:
        draw_training(found, cost.host.memory, config.plot)
    return 0
