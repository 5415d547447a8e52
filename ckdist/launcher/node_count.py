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


class NodeCount:
    """The answer of one host's agent."""

    def __init__(self) -> None:
        self.nodes: int | None = None
        self.trouble = ""

    def counted(self, nodes: int) -> None:
        """The agent has counted the host's nodes."""
        self.nodes = min(max(1, nodes), MAX_RANKS)

    def said(self, text: bytes) -> None:
        """Does nothing: these lines are printed when the ranks start."""

    def lost(self, reason: str, code: int, reached: bool) -> None:  # noqa: ARG002, the protocol has them
        """The host cannot be reached."""
        self.trouble = self.trouble or reason

    def line(self, rank: int, stream: int, text: bytes) -> None:
        """Does nothing: there is no rank yet."""

    def carry(self, peer: int, data: bytes) -> None:
        """Does nothing: there is no rank yet."""

    def ended(self, rank: int, code: int) -> None:
        """Does nothing: there is no rank yet."""


def with_slots(hosts: Sequence[Host], agent: str | None, children: Children) -> tuple[Host, ...]:
    """Returns the hosts with a slot per NUMA node if they have no number of slots.

    Args:
        agent: Template of agents. None: ssh for other hosts, and no agent on this host.

    Raises:
        CommError: A host cannot be reached.
    """
    loop, asked = EventLoop(), {host.name: NodeCount() for host in hosts if host.slots is None}
    remote: list[RemoteRanks] = []
    with loop.signals({signal.SIGCHLD: lambda _: children.reap()}):
        try:
            for host in hosts:
                if host.slots is None and host.is_this and agent is None:
                    asked[host.name].counted(nodes_here())
                elif host.slots is None:
                    words = agent_words(agent or SSH, host.name)
                    remote.append(RemoteRanks(loop, children, asked[host.name], host.name, words))
                    remote[-1].count_nodes()
            deadline = time.monotonic() + REACH_SECONDS
            while any(each.nodes is None and not each.trouble for each in asked.values()) and loop.turn(deadline):
                pass
        finally:
            for each in remote:
                each.kill()
            for each in remote:
                each.close()
    loop.close()
    for name, each in asked.items():
        if each.nodes is None:
            why = each.trouble or f"host {name} has not answered within {REACH_SECONDS:g} s"
            raise CommError(f"{why}; so its NUMA nodes are unknown: give its number of ranks with -n N or {name}:N")
    return tuple(host if host.slots else replace(host, slots=asked[host.name].nodes) for host in hosts)
