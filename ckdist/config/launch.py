"""`ckdist launch`."""

from dataclasses import dataclass, fields

from ckdist.config.options import check_field, integer, option, real
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """`ckdist launch`: start a command as several ranks, here or on several hosts, and watch over them."""

    ranks: int | None = option(
        None,
        "-n",
        "--ranks",
        parse=integer,
        low=1,
        high=256,
        metavar="N",
        help="how many (default: one for each slot, or NUMA node)",
    )
    hosts: str | None = option(
        None, "--hosts", metavar="[USER@]HOST[:SLOTS],...", help="hosts, filled one after the other (default: this one)"
    )
    hostfile: str | None = option(
        None, "--hostfile", metavar="FILE", help="file with one host a line, as node1 slots=2"
    )
    agent: str | None = option(
        None,
        "--agent",
        metavar="TEMPLATE",
        help="what runs a command on a host, as 'ssh {host} {command}'; without {command} its words follow as they are",
    )
    on: str | None = option(
        None,
        "--on",
        choices=("ray",),
        help="take the hosts from a cluster: of ray whole nodes, as many as ranks at most",
    )
    env: tuple[str, ...] = option(
        (),
        "-x",
        "--env",
        repeat=True,
        metavar="NAME[=VALUE]",
        help="variable that ranks on other hosts get too, as they get CKDIST_*; may be given several times",
    )
    restarts: int = option(
        0,
        "--restarts",
        parse=integer,
        low=0,
        high=1 << 20,
        metavar="K",
        help="how often in a row all ranks start again when one is lost; a mistake of the user's (code 2) ends the job",
    )
    min_ranks: int | None = option(
        None,
        "--min-ranks",
        parse=integer,
        low=1,
        high=256,
        metavar="M",
        help="go on with so many ranks at least where hosts cannot be reached (default: all)",
    )
    stop_timeout: float = option(
        300.0,
        "--stop-timeout",
        parse=real,
        low=0,
        high=86400,
        metavar="SECONDS",
        help="how long ranks may take to end after SIGTERM",
    )
    no_prefix: bool = option(False, "--no-prefix", help="write the ranks' lines without [RANK]")
    verbose: bool = option(False, "-v", "--verbose", help="log more")
    command: tuple[str, ...] = option((), "command", rest=True, metavar="COMMAND ...", help="what every rank runs")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_field(item, getattr(self, item.name))
        if not self.command:
            raise ConfigError("which command? ckdist launch -n 2 ckdist serve")
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError(f"--hosts ({self.hosts}) and --hostfile ({self.hostfile}) both name hosts: give one")
        if self.on is not None and (self.hosts or self.hostfile or self.agent):
            raise ConfigError(f"--on {self.on} takes hosts from there: leave --hosts, --hostfile and --agent out")
