"""Probes the transports, launchers and kernels of this machine, all at once and within a time limit.

A probe that may crash, hang or leave traces (an MPI library, a launcher, a driver) runs in a process of its own. A
probe that is late is abandoned.
"""

import contextlib
import glob
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from ckdist import native
from ckdist.comm.bootstrap.handshake import read_secret
from ckdist.errors import CkdistError, ConfigError
from ckdist.python_words import code_words
from ckdist.topology import Machine
from ckdist.topology.instructions import reason

TIMEOUT = 2.5
GRACE = 0.5  # seconds to end the processes of late probes
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ROOT_WANTS = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"


@dataclass(frozen=True)
class Capability:
    """The result of one probe."""

    group: str  # transport, launcher or kernels
    name: str
    works: bool
    about: str  # its version or device, or the reason that it does not work


def run_briefly(command: list[str], timeout: float = TIMEOUT) -> tuple[int, str]:
    """Returns the exit code and output of a command. Code 124: killed with its children after `timeout` seconds."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return 127, str(error.strerror)
    try:
        text = process.communicate(timeout=timeout)[0].decode(errors="replace").strip()
        return process.returncode, text
    except subprocess.TimeoutExpired:
        return 124, f"no end within {timeout:.1f} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()  # not read to its end: a grandchild in its own session may hold the pipe
        process.wait()


def last_line(text: str, most: int = 100) -> str:
    """Returns the last line of `text` that is not blank, at most `most` characters of it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:most]


def capabilities(machine: Machine, timeout: float = TIMEOUT) -> list[Capability]:
    """Runs all probes within a little more than `timeout` seconds. Returns the results in display order."""
    tries: dict[tuple[str, str], Callable[[], tuple[bool, str]]] = {
        ("transport", "shared memory"): shared_memory,
        ("transport", "MPI"): lambda: mpi(timeout),
        ("transport", "TCP"): tcp,
        ("transport", "verbs"): lambda: verbs(machine, timeout),
        ("launcher", "mpirun"): lambda: mpirun(timeout),
        ("launcher", "srun"): srun,
        ("launcher", "torchrun-style"): torchrun,
    }

    found: dict[tuple[str, str], Capability] = {}

    def attempt(group: str, name: str) -> None:
        """Runs one probe. An exception becomes the reason that it does not work."""
        try:
            found[group, name] = Capability(group, name, *tries[group, name]())
        except Exception as error:  # one broken installation must not hide the rest of the machine
            found[group, name] = Capability(group, name, False, last_line(f"{type(error).__name__}: {error}"))

    end = time.monotonic() + timeout + GRACE
    threads = [threading.Thread(target=attempt, args=key, daemon=True) for key in tries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {timeout:.1f} s"
    return [*(found.get(key) or Capability(*key, False, late) for key in tries), *kernels(machine)]


def shared_memory() -> tuple[bool, str]:
    """Creates a rendezvous of one rank."""
    try:
        native.new(native.lib.ckdist_rendezvous_new, None, 0, 1, [0], 10, 1.0)
        return True, "memfd, inside one host"
    except CkdistError as error:
        return False, str(error)


def mpi(timeout: float = TIMEOUT) -> tuple[bool, str]:
    """Loads mpi4py in a process of its own."""
    if importlib.util.find_spec("mpi4py") is None:
        return False, "mpi4py is not installed: pip install 'ckdist[mpi]'"
    code, text = run_briefly(
        code_words(
            "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
            "print(MPI.Get_library_version().splitlines()[0])"
        ),
        timeout,
    )
    return code == 0, last_line(text).rstrip("\0").split(", package")[0]


def tcp() -> tuple[bool, str]:
    """Connects over loopback, and lists the other interfaces."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=1),
        ):
            works, why = True, ""
    except OSError as error:
        works, why = False, f"a connection to 127.0.0.1 fails: {error.strerror or error}"
    named = []
    up = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for address in addresses:
            if (
                address.family == socket.AF_INET
                and not address.address.startswith("127.")
                and name in up
                and up[name].isup
            ):
                speed = f" {up[name].speed} Mbit/s" if up[name].speed > 0 else ""
                named.append(f"{name} {address.address}{speed}")
    return works, why or "; ".join(named[:4]) or "loopback only"


def verbs(machine: Machine, timeout: float = TIMEOUT) -> tuple[bool, str]:
    """Opens the port that a rank would use, and sends data over a connection on it."""
    active = ", ".join(sorted({port.device for port in machine.rdma if port.state == "ACTIVE"}))
    if not machine.rdma:
        return False, "no RDMA device"
    if not active:
        return False, f"no active port on {', '.join(sorted({port.device for port in machine.rdma}))}"
    if not any(os.access(path, os.R_OK | os.W_OK) for path in glob.glob("/dev/infiniband/uverbs*")):  # noqa: PTH207
        return False, f"{active}: /dev/infiniband/uverbs* cannot be opened"
    tried = (
        "from ckdist.comm.transports.verbs import verbs_works; works, about = verbs_works(); "
        "print(about); raise SystemExit(not works)"
    )
    began = time.monotonic()
    code, text = run_briefly(code_words(tried), timeout)
    about = f"{active}: {text}" if code == 124 else last_line(text)
    if importlib.util.find_spec("pyverbs") is not None:
        listed = "import pyverbs.device as d; print(*(i.name.decode() for i in d.get_device_list()))"
        pyverbs, text = run_briefly(code_words(listed), max(0.1, timeout - (time.monotonic() - began)))
        about += f"; pyverbs sees {last_line(text)}" if pyverbs == 0 else "; pyverbs does not load"
    return code == 0, about


def mpirun(timeout: float = TIMEOUT) -> tuple[bool, str]:
    """Starts one process with mpirun, unless mpirun started this one."""
    path = shutil.which("mpirun")
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        return True, "this process is one of its ranks"
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))  # noqa: PTH120
    if not path and beside:
        return False, f"not on the PATH: export PATH={os.path.dirname(beside)}:$PATH"  # noqa: PTH120
    if not path:
        return False, "not on the PATH: pip install 'ckdist[mpi]', or load your cluster's MPI"
    code, text = run_briefly([path, "-n", "1", "true"], timeout)
    if code and "root" in text:
        return False, f"refuses root: {ROOT_WANTS}"
    return code == 0, path if code == 0 else f"{path}: {last_line(text) or f'exit code {code}'}"


def srun() -> tuple[bool, str]:
    """Checks whether this shell has an allocation of Slurm."""
    path = shutil.which("srun")
    if not path:
        return False, "no Slurm here"
    if "SLURM_JOB_ID" not in os.environ:
        return False, f"{path}, but this shell has no allocation: use salloc or sbatch"
    return True, f"{path}, job {os.environ['SLURM_JOB_ID'][:20]}"


def torchrun() -> tuple[bool, str]:
    """Checks the variables of torchrun, and whether the secret can be read if one is named."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if len(missing) == len(TORCHRUN):
        return False, f"{', '.join(TORCHRUN)} are not set"
    if missing:
        return False, f"{', '.join(missing)} missing"
    about = f"rank {os.environ['RANK'][:10]} of {os.environ['WORLD_SIZE'][:10]}"
    try:
        read_secret()
    except ConfigError as error:
        return False, f"{about}: {error}"
    return True, about


def kernels(machine: Machine) -> list[Capability]:
    """Returns every level of instructions, plainest first."""
    chosen = native.isa()
    rows = []
    for isa, lacks in reversed(native.isas().items()):
        refused = isa == "amx" and machine.amx == "refused"
        if isa == chosen:
            about = f"chosen: {reason()}"
        elif lacks:
            about = "the kernel refuses the tiles" if refused else f"this CPU lacks {lacks}"
        else:
            about = "CKDIST_ISA chooses it"
        rows.append(Capability("kernels", isa, not lacks, about))
    return rows
