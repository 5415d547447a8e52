"""`python -m ckdist.launcher.ray_nodes COUNT`: reserves whole nodes of a Ray cluster until its input ends.

The nodes are a placement group with one bundle per node: all CPUs of the node. This process owns the group, so Ray
frees the nodes when it ends for any reason. It prints one line of JSON: the group and its hosts, or in `failed` the
reason for a failure, and in `user` whether it is the user's mistake.
"""

import importlib
import json
import os
import secrets
import socket
import sys
from typing import Any

from ckdist.errors import CkdistError, CommError, ConfigError, UserError

NAMESPACE = "ckdist"
PROBE_SECONDS = 10.0
HOLD_SECONDS = 60.0  # limit for all nodes to become free


def connected() -> Any:
    """Returns the `ray` package, connected to the cluster of RAY_ADDRESS or of this host.

    Raises:
        ConfigError: The package is missing.
        CommError: There is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("--on ray needs the package ray: pip install 'ckdist[ray]'") from None
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _probe(address)
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise CommError(
            f"no Ray cluster at {address}: {str(error).splitlines()[0]:.200} Start one with `ray start --head`, or set "
            "RAY_ADDRESS"
        ) from None
    return ray


def _probe(address: str) -> None:
    """Raises OSError if nothing listens at `host:port`. Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()


def hold(ray: Any, count: int | None) -> tuple[str, list[str]]:
    """Reserves all whole nodes, or at most `count`.

    Returns:
        The name of the placement group, and the names of its nodes as hosts.

    Raises:
        CommError: There are no nodes, or they do not become free in time.
    """
    found = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    wanted = min(len(found), count or len(found))
    if not wanted:
        raise CommError("no node of the Ray cluster has CPUs: `ray status` lists their resources")
    cores = sorted((node["Resources"]["CPU"] for node in found), reverse=True)[:wanted]
    name = f"ckdist-{secrets.token_hex(8)}"
    util = importlib.import_module("ray.util")
    group = util.placement_group([{"CPU": each} for each in cores], strategy="STRICT_SPREAD", name=name)
    if not group.wait(HOLD_SECONDS):
        raise CommError(
            f"Ray has not given all CPUs ({', '.join(f'{each:g}' for each in cores)}) of {wanted} nodes within "
            f"{HOLD_SECONDS:g} seconds: `ray status` shows their other users"
        )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in found}
    places = util.placement_group_table(group)["bundles_to_node_id"]
    return name, [f"{bundle}@{addresses[places[bundle]]}" for bundle in range(wanted)]


def main(words: list[str]) -> int:
    """Reserves the nodes until standard input ends."""
    count = int(words[0]) if words else None
    try:
        name, hosts = hold(connected(), count)
    except CkdistError as error:
        print(json.dumps({"failed": str(error), "user": isinstance(error, UserError)}), flush=True)
        return 1
    print(json.dumps({"group": name, "hosts": hosts}), flush=True)
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
