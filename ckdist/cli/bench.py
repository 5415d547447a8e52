"""`ckdist bench`: measures a model, drafts, the engine's steps, the machine or the ranks' collectives."""

from ckdist.cli import bench_comm, bench_drafts, bench_machine, bench_model, bench_steps
from ckdist.config.bench_config import BenchConfig

TARGETS = {
    "model": bench_model.run,
    "drafts": bench_drafts.run,
    "steps": bench_steps.run,
    "machine": bench_machine.run,
    "comm": bench_comm.run,
}


def run(config: BenchConfig) -> int:
    """Runs the benchmark that `target` names. Returns 0."""
    return TARGETS[config.target](config)
