"""The ranks of a job that was started without MPI: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets
them, or what Slurm tells instead (`slurm`).

Rank 0 listens at the master's address; the others connect to it and prove the job's secret (`handshake`). What is
exchanged here is small msgpack at start-up, with capped sizes (`connection`); the traffic of every step goes elsewhere.
Who shares a host is found out by the host's boot, so LOCAL_RANK is not needed.
"""

import fcntl
import os
import socket
import struct
import time

from ckdist.comm.bootstrap.connection import BootstrapConnection
from ckdist.comm.bootstrap.handshake import Listener, Purpose, connect, read_secret
from ckdist.comm.bootstrap.slurm import step_variables
from ckdist.comm.bootstrap.star_world import StarWorld
from ckdist.comm.protocol import Log
from ckdist.errors import CommError, ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACE_VARIABLE = "CKDIST_INTERFACE"
TIMEOUT_VARIABLE = "CKDIST_START_TIMEOUT"
AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
MAX_RANKS = 256
START_SECONDS = 120.0  # until all ranks have come
_SIOCGIFADDR = 0x8915


def told() -> dict[str, str]:
    """What the environment says of VARIABLES, or else Slurm of a task of srun; "" where neither does."""
    step = step_variables(os.environ)
    return {name: os.environ.get(name) or step.get(name, "") for name in VARIABLES}


def is_started() -> bool:
    """Did srun or a torchrun-style launcher start this process, as one of several? ConfigError when it told a part."""
    given = told()
    missing = [name for name in VARIABLES if not given[name]]
    if missing and any(given[name] for name in VARIABLES[:2]):
        raise ConfigError(
            f"{', '.join(missing)} missing beside {', '.join(n for n in VARIABLES if n not in missing)}: "
            f"set all of {', '.join(VARIABLES)} on every rank, or none"
        )
    return not missing and _environment()[:2] != (0, 1)


def address_of(interface: str) -> str:
    """The address of a network interface (`eth0`), or the address itself; ConfigError where it is neither."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    try:
        return str(socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"{interface!r} is neither an interface nor an address of this host, which has {names}"
        ) from None


def _resolve(name: str) -> str:
    """The address of a host; ConfigError where it is not known."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR ({name}) is not known here ({error}): give rank 0's address") from None


def _environment() -> tuple[int, int, str, int]:
    """Rank, size, and rank 0's address and port, as the launcher says; ConfigError for what is no number."""
    values = told()
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not values[name].isdigit() or len(values[name]) > 6:
            raise ConfigError(f"{name} ({values[name]!r}) must be a whole number")
    # torchrun's own agent listens at the port that it tells, where it says so.
    beside = os.environ.get(AGENT_VARIABLE, "").lower() in ("1", "true")
    return int(values["RANK"]), int(values["WORLD_SIZE"]), values["MASTER_ADDR"], int(values["MASTER_PORT"]) + beside


def start_seconds() -> float:
    """How long ranks wait for one another; ConfigError where the variable is not a number of seconds."""
    text = os.environ.get(TIMEOUT_VARIABLE) or str(START_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"{TIMEOUT_VARIABLE} ({text!r}) must be a number of seconds")
    return seconds


class TcpWorld(StarWorld):
    """A job's ranks over TCP."""

    def __init__(
        self,
        rank: int,
        size: int,
        master: str,
        port: int,
        secret: bytes,
        interface: str | None = None,
        timeout: float = START_SECONDS,
        host: str | None = None,
        log: Log | None = None,
    ) -> None:
        """Joins the job; a collective call.

        `master`, `port`: where rank 0 listens. `interface`: name or address that this rank uses. `timeout`: seconds
        until all have come. `host`: the name of this rank's host, where it is not the machine's. `log`: takes a line
        for each stranger. Raises ConfigError for what the user can mend, CommError where ranks are missing.
        """
        if not 0 < size <= MAX_RANKS or not 0 <= rank < size:
            raise ConfigError(
                f"RANK ({rank}) of WORLD_SIZE ({size}) is not possible: "
                f"ranks count from 0, and at most {MAX_RANKS} are supported"
            )
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT ({port}) must be from 1 to 65535")
        super().__init__(rank, size, secret)
        own = address_of(interface) if interface else ""
        if rank == 0:
            self.address = own or _resolve(master)
            self._assemble(port, secret, timeout, log)
        else:
            connection = connect((master, port), Purpose(b"boot", rank, 0, size), secret, timeout, own)
            self.address = connection.getsockname()[0]
            self._connections[0] = BootstrapConnection(0, connection, quiet=timeout)  # rank 0 waits for the others
            (problem,) = self._receive([0], timeout + 10)
            if problem:
                raise ConfigError(str(problem)) if "WORLD_SIZE" in str(problem) else CommError(str(problem))
        self.find_hosts(host)

    def _assemble(self, port: int, secret: bytes, timeout: float, log: Log | None) -> None:
        """Rank 0 takes the others as they come, and tells those who came when it cannot go on."""
        listener = Listener(self.address, port, 0, secret, log=log)
        deadline, problem, came_so_far = time.monotonic() + timeout, None, {}
        try:
            while len(came_so_far) < self.size - 1 and not problem:
                came = listener.take_any(deadline)
                if came is None:
                    missing = [r for r in range(1, self.size) if r not in came_so_far]
                    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
                    problem = CommError(
                        f"{names} of {self.size} did not come to {self.address}:{port} within {timeout:.0f} s: "
                        "start all with the same MASTER_ADDR, MASTER_PORT and job secret, "
                        f"or wait longer with {TIMEOUT_VARIABLE}"
                    )
                    break
                purpose, connection = came
                rank, size = purpose.source, purpose.lane
                if size != self.size:
                    problem = ConfigError(
                        f"rank {rank} was started with WORLD_SIZE {size} and rank 0 with WORLD_SIZE {self.size}: "
                        "give all ranks the same"
                    )
                elif rank in came_so_far or not 0 < rank < size:
                    problem = ConfigError(f"RANK {rank} of WORLD_SIZE {size} came twice: give every process its own")
                came_so_far[rank if rank not in came_so_far else -1] = connection
        finally:
            listener.close()
        self._connections = {peer: BootstrapConnection(peer, connection) for peer, connection in came_so_far.items()}
        for peer in self._connections:
            try:
                self._send(peer, problem and str(problem))
            except CommError as error:
                problem = problem or error
        if problem:
            self.close()
            raise problem

    @classmethod
    def from_environment(cls, log: Log | None = None) -> "TcpWorld":
        """The world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, with the secret that
        CKDIST_JOB_SECRET_FILE names.
        """
        return cls(*_environment(), read_secret(), os.environ.get(INTERFACE_VARIABLE), start_seconds(), log=log)
