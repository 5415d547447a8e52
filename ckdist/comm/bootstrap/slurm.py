"""The job of a task of Slurm's srun, from its environment. The first node has rank 0.

This is for srun without PMIx (`--mpi=none`). A batch script is not a task: srun alone sets SLURM_STEP_NUM_TASKS.
"""

import re
from collections.abc import Mapping

from ckdist.errors import ConfigError

RANK, SIZE, NODES = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
FIRST_PORT, PORTS = 20000, 10000  # below the kernel's ephemeral ports
_BRACKETS = re.compile(r"\[(\d+)[-,\d]*\]")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def first_node(nodes: str) -> str:
    """The first node of a Slurm node list: node07 of `node[07-09,12],login1`. Raises ConfigError if it is not a node
    list.
    """
    bare = _BRACKETS.sub(r"\1", nodes).split(",", maxsplit=1)[0]
    if not _NAME.fullmatch(bare):
        raise ConfigError(f"{NODES} ({nodes:.80}) is no list of nodes, as node[01-04]")
    return bare


def step_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task of srun; empty outside one.

    The port is derived from the numbers of job and step, so jobs that share a node use different ports.
    """
    if not all(environment.get(name) for name in (RANK, SIZE, NODES)):
        return {}
    job, step = (int(re.sub(r"\D", "", environment.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": environment[RANK],
        "WORLD_SIZE": environment[SIZE],
        "MASTER_ADDR": first_node(environment[NODES]),
        "MASTER_PORT": str(FIRST_PORT + (16 * job + step) % PORTS),
    }
