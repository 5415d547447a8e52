"""`ckdist bench`: speed of a model, of the engine's steps, of the machine, or of the ranks' exchanges, in rows."""

from ckdist.cli import bench_comm, bench_machine, bench_model, bench_steps
from ckdist.config.bench import BenchConfig

TARGETS = {"model": bench_model.run, "steps": bench_steps.run, "machine": bench_machine.run, "comm": bench_comm.run}


def run(config: BenchConfig) -> int:
    """Measures what `target` says; 0."""
    return TARGETS[config.target](config)
