"""Holds the packed weights of this host's ranks between two runs (`ckdist/weights/kept_weights.py`).

A pair of sockets per rank carries a message from a rank to its successor. This process never reads it. The memory in
the message is freed when this process ends, however it ends.
"""

import os
import socket
from collections.abc import Sequence

from ckdist.comm.bootstrap.launched_world import describe, inherited
from ckdist.comm.bootstrap.launchers import KEPT_VARIABLE
from ckdist.launcher.rank_forker import RankForker


class Keeper:
    """The sockets of each rank of this host, by its local number, and the process that forks these ranks."""

    def __init__(self) -> None:
        self.forker = RankForker()
        self._ends: dict[int, tuple[socket.socket, socket.socket]] = {}  # reading, writing

    @staticmethod
    def inherited() -> "Keeper | None":
        """Takes the sockets that this process got from a keeper: it starts the ranks. None: there is no keeper.

        Raises ConfigError if this process did not inherit them.
        """
        if (text := os.environ.pop(KEPT_VARIABLE, None)) is None:
            return None
        keeper, ends = Keeper(), inherited(text)
        keeper._ends = {rank: (ends[2 * rank], ends[2 * rank + 1]) for rank in range(len(ends) // 2)}
        return keeper

    def descriptors(self, ranks: Sequence[int]) -> list[int]:
        """Returns the descriptors that a process for these ranks inherits."""
        for rank in ranks:
            if rank not in self._ends:
                self._ends[rank] = socket.socketpair(type=socket.SOCK_DGRAM)
        return [end.fileno() for rank in ranks for end in self._ends[rank]]

    def environment(self, ranks: Sequence[int]) -> dict[str, str]:
        """Returns the variable that names these descriptors."""
        return {KEPT_VARIABLE: describe(dict(enumerate(self.descriptors(ranks))))}
