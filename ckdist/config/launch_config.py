"""`ckdist launch`."""

from dataclasses import dataclass

from ckdist.config.options import CommandSettings, option
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchCommand(CommandSettings):
    """`ckdist launch`: start a command as several ranks, here or on several hosts, and supervise them."""

    ranks: int | None = option(
        None, "-n", within=(1, 256), help="number of ranks (default: one per slot, or per NUMA node)"
    )
    hosts: str | None = option(
        None, metavar="[USER@]HOST[:SLOTS],...", help="hosts, filled in this order (default: this host)"
    )
    hostfile: str | None = option(None, metavar="FILE", help="file with one host per line, e.g. node1 slots=2")
    agent: str | None = option(
        None, metavar="TEMPLATE",
        help="program that runs a command on a host, e.g. 'ssh {host} {command}'; words are appended without {command}",
    )  # fmt: skip
    on: str | None = option(
        None, choices=("ray",), help="take the hosts from a cluster; ray: reserve whole nodes, at most one per rank"
    )
    env: tuple[str, ...] = option(
        (), "-x", repeat=True, metavar="NAME[=VALUE]",
        help="pass this variable to ranks on other hosts, in addition to CKDIST_*; may be repeated",
    )  # fmt: skip
    restarts: int = option(
        0, within=(0, 1 << 20), metavar="K",
        help="restart all ranks after a rank is lost, at most K times in a row; exit code 2 is never restarted",
    )  # fmt: skip
    min_ranks: int | None = option(
        None, within=(1, 256), metavar="M",
        help="continue with at least M ranks if hosts cannot be reached (default: all)",
    )  # fmt: skip
    spares: int = option(
        0, within=(0, 255), metavar="N",
        help="the last N hosts are spares: one takes the ranks of a host that cannot be reached at a restart",
    )  # fmt: skip
    stop_timeout: float = option(
        300.0, within=(0, 86400), metavar="SECONDS", help="limit for ranks to end after SIGTERM, before they are killed"
    )
    no_prefix: bool = option(False, help="print the output of ranks without the prefix [RANK]")
    command: tuple[str, ...] = option(
        (), "command", rest=True, metavar="COMMAND ...", help="command that every rank runs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command:
            raise ConfigError("which command? ckdist launch -n 2 ckdist serve")
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError(f"--hosts ({self.hosts}) and --hostfile ({self.hostfile}) both name hosts: give one")
        if self.spares and (self.restarts == 0 or self.on):
            raise ConfigError(f"--spares {self.spares} needs --restarts K, and --hosts or --hostfile")
        if self.on is not None and (self.hosts or self.hostfile or self.agent):
            raise ConfigError(
                f"--on {self.on} takes the hosts from {self.on}: leave --hosts, --hostfile and --agent out"
            )
