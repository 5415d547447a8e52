"""`ckdist launch -n N COMMAND`: starts the ranks of a job without MPI."""

import os
import pathlib
from typing import TYPE_CHECKING

from ckdist.cli.frozen_import import frozen_import
from ckdist.cli.parent_server import has_parent_server, may_restart
from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.config.launch_config import LaunchCommand
from ckdist.errors import ConfigError
from ckdist.launcher.children import Children
from ckdist.launcher.hosts import Host, parse_hosts, place_ranks, read_hostfile
from ckdist.launcher.job import Job
from ckdist.launcher.keeper import Keeper
from ckdist.launcher.node_count import with_slots
from ckdist.launcher.rank_output import Output
from ckdist.launcher.ray_hosts import RayHosts
from ckdist.launcher.supervisor import Policy, Supervisor

if TYPE_CHECKING:
    from ckdist.config.serve_config import ServeConfig


def hosts_of(command: LaunchCommand) -> tuple[Host, ...]:
    """Returns the hosts of the command line or of its hostfile. Defaults to this host."""
    if command.hostfile is not None:
        return read_hostfile(command.hostfile)
    return parse_hosts(command.hosts) if command.hosts is not None else (Host("localhost"),)


def forwarded(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the environment variables for ranks on other hosts: `names` and CKDIST_*.

    Args:
        names: NAME or NAME=VALUE.

    Raises:
        ConfigError: A NAME without a value is not set here.
    """
    result = {name: value for name, value in os.environ.items() if name.startswith("CKDIST_")}
    for text in names:
        name, given, value = text.partition("=")
        if not given and name not in os.environ:
            raise ConfigError(f"-x {name}: that variable is not set here; write -x {name}=VALUE")
        result[name] = value if given else os.environ[name]
    return result


def supervised(
    command: LaunchCommand, hosts: tuple[Host, ...], agent: str | None, children: Children | None = None
) -> int:
    """Runs the job on these hosts. Returns its exit code."""
    keeper = Keeper.inherited()  # before `forwarded`: its variable is this host's
    if command.spares >= len(hosts):
        raise ConfigError(f"--spares {command.spares} leaves none of {len(hosts)} hosts for the job: name more hosts")
    children, output = children or Children(), Output(not command.no_prefix)
    if command.ranks is None and not all(host.slots for host in hosts):
        hosts = with_slots(hosts, agent, children)
        counts = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        output.say(f"one rank for each NUMA node: {counts}; use -n N or slots to change it")
    hosts, spares = hosts[: len(hosts) - command.spares], hosts[len(hosts) - command.spares :]
    size = sum(map(len, place_ranks(command.ranks, hosts).values()))
    is_engine = has_parent_server()
    keeps = is_engine or command.restarts > 0
    job = Job(command.command, size, str(pathlib.Path.cwd()), forwarded(command.env), keeps=keeps)
    policy = Policy(command.restarts, command.min_ranks, command.stop_timeout)
    again = AGAIN in os.environ
    return Supervisor(
        *(job, hosts, policy, output, agent, children),
        reached=again,
        keeper=keeper,
        spares=spares,
        may_restart=may_restart if is_engine else None,
    ).run()


def server_of(command: LaunchCommand) -> "tuple[list[str], ServeConfig] | None":
    """The words before `serve` and its settings, if the ranks are of a server that their HTTP process may outlive.

    Rank 0 must be on this host, since the HTTP process reaches it by a socket in a folder.
    """
    words = command.command
    at = words.index("serve") if "serve" in words else 0
    is_ours = at > 0 and pathlib.Path(words[at - 1]).name in ("ckdist", "ckdist.cli.main")
    if not is_ours or has_parent_server() or command.spares or not hosts_of(command)[0].is_this:
        return None
    from ckdist.cli.arguments import parse_arguments
    from ckdist.config.serve_config import ServeConfig

    config = parse_arguments(ServeConfig, words[at + 1 :], "ckdist serve")
    return None if config.is_router or config.no_restart else (_words(command) + list(words[:at]), config)


def _words(command: LaunchCommand) -> list[str]:
    """`launch` with its flags, without --restarts."""
    flags = {
        "--ranks": command.ranks,
        "--hosts": command.hosts,
        "--hostfile": command.hostfile,
        "--agent": command.agent,
        "--min-ranks": command.min_ranks,
        "--stop-timeout": command.stop_timeout,
    }
    words = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    words += [f"--env={variable}" for variable in command.env]
    return ["launch", *words, *["--no-prefix"] * command.no_prefix]


def run(command: LaunchCommand) -> int:
    """Runs the job. Returns its exit code."""
    if command.on is None:
        if (server := server_of(command)) is not None:
            launch, config = server
            here = command.ranks or hosts_of(command)[0].slots or 0
            return frozen_import("ckdist.cli.serve_restarting").run(config, launch, command.restarts, here)
        return supervised(command, hosts_of(command), command.agent)
    children = Children()
    with RayHosts(children, command.ranks) as nodes:
        return supervised(command, nodes.hosts, nodes.agent, children)
