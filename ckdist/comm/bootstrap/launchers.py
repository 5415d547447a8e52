"""The environment variables that launchers set for a rank."""

import os

MAX_RANKS = 1024  # of a job
CONNECTIONS_VARIABLE = "CKDIST_CONNECTIONS"  # of `ckdist launch`: see `launched_world`
AGAIN = "CKDIST_ENGINE_AGAIN"  # set if the job ran before
KEPT_VARIABLE = "CKDIST_KEPT_ARENAS"  # of processes that restart ranks: see `launcher/keeper.py`
# Set by the launchers of Open MPI, MPICH and Intel MPI, and by PMIx, such as Slurm's.
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
# All variables that make a process a rank. A rank must not pass them on to jobs that it starts.
RANK_VARIABLES = frozenset(
    {
        *MPI_VARIABLES,
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("PMI_RANK", "PMI_FD", "PMIX_NAMESPACE", "MPI_LOCALRANKID"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK", "ROLE_RANK"),
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
        *(CONNECTIONS_VARIABLE, KEPT_VARIABLE),
    }
)
_SIGNS = (*MPI_VARIABLES, "RANK", "WORLD_SIZE", CONNECTIONS_VARIABLE)


def is_rank() -> bool:
    """True if a launcher started this process as a rank, or srun as one of several tasks."""
    return any(os.environ.get(name) for name in _SIGNS) or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
