"""Counts the NUMA nodes of hosts without a number of slots: the default is one rank per node."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from ckdist.comm.bootstrap.launchers import MAX_RANKS
from ckdist.errors import CommError
from ckdist.launcher.attempt import REACH_SECONDS
from ckdist.launcher.children import Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.hosts import Host
from ckdist.launcher.local_ranks import nodes_here
from ckdist.launcher.remote_ranks import SSH, RemoteRanks, agent_words


class NodeCounts:
    """The answers of the hosts' agents, by host."""

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        self.trouble: dict[str, str] = {}

    def counted(self, host: str, nodes: int) -> None:
        """The agent has counted the host's nodes."""
        self.nodes[host] = min(max(1, nodes), MAX_RANKS)

    def said(self, host: str, text: bytes) -> None:
        """Does nothing: these lines are printed when the ranks start."""

    def lost(self, host: str, reason: str, code: int, reached: bool) -> None:  # noqa: ARG002, the protocol has them
        """The host cannot be reached."""
        self.trouble.setdefault(host, reason)

    def line(self, host: str, rank: int, stream: int, text: bytes) -> None:
        """Does nothing: there is no rank yet."""

    def carry(self, host: str, peer: int, data: bytes) -> None:
        """Does nothing: there is no rank yet."""

    def ended(self, host: str, rank: int, code: int) -> None:
        """Does nothing: there is no rank yet."""


def with_slots(hosts: Sequence[Host], agent: str | None, children: Children) -> tuple[Host, ...]:
    """Returns the hosts with a slot per NUMA node if they have no number of slots.

    Args:
        agent: Template of agents. None: ssh for other hosts, and no agent on this host.

    Raises:
        CommError: A host cannot be reached.
    """
    loop, counts = EventLoop(), NodeCounts()
    asked = [host for host in hosts if host.slots is None]
    remote: list[RemoteRanks] = []
    with loop.signals({signal.SIGCHLD: lambda _: children.reap()}):
        try:
            for host in asked:
                if host.is_this and agent is None:
                    counts.counted(host.name, nodes_here())
                else:
                    words = agent_words(agent or SSH, host.name)
                    remote.append(RemoteRanks(loop, children, counts, host.name, words))
                    remote[-1].count_nodes()
            deadline = time.monotonic() + REACH_SECONDS
            while len(counts.nodes.keys() | counts.trouble) < len(asked) and loop.turn(deadline):
                pass
        finally:
            for each in remote:
                each.kill()
            for each in remote:
                each.close()
    loop.close()
    for host in asked:
        if host.name not in counts.nodes:
            why = counts.trouble.get(host.name, f"host {host.name} has not answered within {REACH_SECONDS:g} s")
            remedy = f"give its number of ranks with -n N or {host.name}:N"
            raise CommError(f"{why}; so its NUMA nodes are unknown: {remedy}")
    return tuple(host if host.slots else replace(host, slots=counts.nodes[host.name]) for host in hosts)
