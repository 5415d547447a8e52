"""The restrictions of a process at its start: allowed CPUs and memory nodes, memory policy, and the launcher."""

import functools
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from ckdist import native
from ckdist.topology.tree import Tree, parse_cpu_list

# Environment variable that a launcher sets for its ranks -> name of the launcher. The first match counts.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "MPI_LOCALNRANKS": "MPICH or Intel MPI",
    "PMI_SIZE": "MPICH or Intel MPI",
    "SLURM_STEP_ID": "Slurm",
    "PMIX_RANK": "PMIx",
    "TORCHELASTIC_RUN_ID": "torchrun",
    "MASTER_ADDR": "torchrun-style",
}
# Settings of launchers and of OpenMP that bind threads or memory.
ASKED = (
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_MEM_BIND", "SLURM_DISTRIBUTION",
    "PRTE_MCA_hwloc_default_binding_policy", "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_rmaps_base_mapping_policy", "I_MPI_PIN", "I_MPI_PIN_DOMAIN",
    "HYDRA_BINDING", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY",
)  # fmt: skip
POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted-interleave")


@dataclass(frozen=True)
class Binding:
    """The restrictions of this process."""

    cpus: tuple[int, ...]  # allowed CPUs
    memory_nodes: tuple[int, ...] | None  # allowed memory nodes; None if not known
    memory_policy: str  # set by numactl or a launcher; one of POLICIES, or unknown
    launcher: str | None
    asked: dict[str, str]  # settings of the environment that bind threads or memory


def times_preempted() -> int:
    """How often other threads have preempted threads of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@functools.lru_cache(maxsize=1)
def own_cpus() -> tuple[int, ...]:
    """The CPUs that this process was started with. They are read once, before any of its threads is pinned."""
    return tuple(sorted(os.sched_getaffinity(0)))


def read_binding(tree: Tree, environment: Mapping[str, str], cpus: tuple[int, ...] | None = None) -> Binding:
    """Reads the restrictions of a process. `cpus`: allowed CPUs; None: those in proc/self/status."""
    status = tree.keyed("proc/self/status")
    listed = _numbers(status.get("Cpus_allowed_list", ""))
    mode = native.lib.ckdist_memory_policy(native.ffi.NULL)
    return Binding(
        cpus=cpus if cpus is not None else listed or (),
        memory_nodes=_numbers(status.get("Mems_allowed_list", "")),
        memory_policy=POLICIES[mode] if 0 <= mode < len(POLICIES) else "unknown",
        launcher=next((name for variable, name in LAUNCHERS.items() if variable in environment), None),
        asked={name: environment[name][:200] for name in ASKED if name in environment},
    )


def _numbers(text: str) -> tuple[int, ...] | None:
    try:
        return parse_cpu_list(text) or None
    except ValueError:
        return None
