"""The ranks of a job without MPI: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun or Slurm sets them.

Rank 0 listens at the master's address. The others connect to it and prove the job's secret (`handshake`). Messages are
msgpack with a size limit (`connection`); the traffic of every step uses other connections. Ranks share a host if its
boot id is the same, so LOCAL_RANK is not needed.
"""

import fcntl
import os
import socket
import struct
import time

from ckdist.comm.bootstrap.connection import BootstrapConnection
from ckdist.comm.bootstrap.handshake import Listener, Purpose, connect, read_secret
from ckdist.comm.bootstrap.launchers import MAX_RANKS
from ckdist.comm.bootstrap.slurm import step_variables
from ckdist.comm.bootstrap.star_world import START_SECONDS, TIMEOUT_VARIABLE, StarWorld, start_seconds
from ckdist.comm.world_protocol import Log
from ckdist.errors import CommError, ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACE_VARIABLE = "CKDIST_INTERFACE"
AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_SIOCGIFADDR = 0x8915


def rank_variables() -> dict[str, str]:
    """The values of VARIABLES in the environment, else of a task of srun; "" if neither has one."""
    step = step_variables(os.environ)
    return {name: os.environ.get(name) or step.get(name, "") for name in VARIABLES}


def is_started() -> bool:
    """True if srun or a torchrun-style launcher started this process as one of several.

    Raises ConfigError if only some of VARIABLES are set.
    """
    given = rank_variables()
    missing = [name for name in VARIABLES if not given[name]]
    if missing and any(given[name] for name in VARIABLES[:2]):
        raise ConfigError(
            f"{', '.join(missing)} missing, but {', '.join(n for n in VARIABLES if n not in missing)} set: "
            f"set all of {', '.join(VARIABLES)} on every rank, or none"
        )
    return not missing and _environment()[:2] != (0, 1)


def address_of(interface: str) -> str:
    """The address of an interface (`eth0`), or of a name or address. Raises ConfigError if it is none of them."""
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
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR ({name}) is not known here ({error}): give rank 0's address") from None


def _environment() -> tuple[int, int, str, int]:
    """Rank, size, and rank 0's address and port. Raises ConfigError if one is not a number."""
    values = rank_variables()
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not values[name].isdigit() or len(values[name]) > 6:
            raise ConfigError(f"{name} ({values[name]!r}) must be a whole number")
    # If this variable is set, torchrun's own agent listens at MASTER_PORT.
    offset = os.environ.get(AGENT_VARIABLE, "").lower() in ("1", "true")
    return int(values["RANK"]), int(values["WORLD_SIZE"]), values["MASTER_ADDR"], int(values["MASTER_PORT"]) + offset


class TcpWorld(StarWorld):
    """A job's ranks over TCP. The constructor is a collective call.

    Args:
        master: Rank 0's address.
        port: Rank 0's port.
        interface: Name or address that this rank uses.
        timeout: Seconds until all ranks must have connected.
        host: Name of this rank's host. Default: the machine's.
        log: Receives a line for each connection that was dropped.
        encrypt: `--encrypt`.

    Raises:
        ConfigError: The settings of the ranks are wrong or differ.
        CommError: Ranks are missing.
    """

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
        encrypt: str = "auto",
    ) -> None:
        if not 0 < size <= MAX_RANKS or not 0 <= rank < size:
            raise ConfigError(
                f"RANK ({rank}) of WORLD_SIZE ({size}) is not possible: "
                f"ranks count from 0, and at most {MAX_RANKS} are supported"
            )
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT ({port}) must be from 1 to 65535")
        super().__init__(rank, size, secret, encrypt)
        sealed = encrypt != "never"
        own = address_of(interface) if interface else ""
        if rank == 0:
            self.address = own or _resolve(master)
            self._assemble(Listener(self.address, port, 0, secret, log=log, sealed=sealed), timeout)
        else:
            purpose = Purpose(b"boot", rank, 0, size)
            connection, keys = connect((master, port), purpose, secret, timeout, own, sealed)
            self.address = connection.getsockname()[0]
            # Rank 0 sends only when all ranks are there.
            self._connections[0] = BootstrapConnection(0, connection, quiet=timeout, keys=keys)
            (problem,) = self._receive([0], timeout + 10)
            if problem:
                raise ConfigError(str(problem)) if "WORLD_SIZE" in str(problem) else CommError(str(problem))
        self.find_hosts(host)

    def _assemble(self, listener: Listener, timeout: float) -> None:
        """Rank 0 accepts the other ranks. If it cannot go on, it sends the reason to those that are connected."""
        port = listener.address[1]
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
                purpose, joined = came
                rank, size = purpose.source, purpose.lane
                if size != self.size:
                    problem = ConfigError(
                        f"rank {rank} was started with WORLD_SIZE {size} and rank 0 with WORLD_SIZE {self.size}: "
                        "give all ranks the same"
                    )
                elif rank in came_so_far or not 0 < rank < size:
                    problem = ConfigError(f"RANK {rank} of WORLD_SIZE {size} came twice: give every process its own")
                came_so_far[rank if rank not in came_so_far else -1] = joined
        finally:
            listener.close()
        self._connections = {
            peer: BootstrapConnection(peer, connection, keys=keys) for peer, (connection, keys) in came_so_far.items()
        }
        for peer in self._connections:
            try:
                self._send(peer, problem and str(problem))
            except CommError as error:
                problem = problem or error
        if problem:
            self.close()
            raise problem

    @classmethod
    def from_environment(cls, log: Log | None = None, encrypt: str = "auto") -> "TcpWorld":
        """The world of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with the secret in CKDIST_JOB_SECRET_FILE."""
        return cls(
            *_environment(),
            read_secret(),
            os.environ.get(INTERFACE_VARIABLE),
            start_seconds(),
            log=log,
            encrypt=encrypt,
        )
