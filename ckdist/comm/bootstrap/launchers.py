"""The variables by which launchers tell a process that it is a rank."""

import os

# Set by the launchers of Open MPI, MPICH and Intel MPI, and by Slurm's and others' PMIx.
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
# All that make a process a rank of a job: what starts ranks of its own must not pass them on.
RANK_VARIABLES = frozenset(
    {
        *MPI_VARIABLES,
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("PMI_RANK", "PMI_FD", "PMIX_NAMESPACE", "MPI_LOCALRANKID"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK", "ROLE_RANK"),
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
        "CKDIST_CONNECTIONS",
    }
)
_TELLING = (*MPI_VARIABLES, "RANK", "WORLD_SIZE", "CKDIST_CONNECTIONS")


def is_rank() -> bool:
    """Has a launcher started this process, or srun as one of several tasks?"""
    return any(os.environ.get(name) for name in _TELLING) or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
