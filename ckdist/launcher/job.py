"""The job to start: its command, the number of ranks, and the environment of each rank."""

import os
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckdist.comm.bootstrap.launched_world import describe
from ckdist.comm.bootstrap.launchers import CONNECTIONS_VARIABLE, RANK_VARIABLES

FULL_RANKS_VARIABLE = "CKDIST_JOB_BEGAN_WITH"  # ranks, if the job continues with fewer (--min-ranks)
_REPLACED = RANK_VARIABLES | {FULL_RANKS_VARIABLE}


@dataclass(frozen=True)
class Job:
    """A command that runs as ranks 0 to size - 1."""

    command: tuple[str, ...]
    size: int
    folder: str  # working directory
    environment: dict[str, str] = field(default_factory=dict[str, str])  # added to each host's own
    # True: the output of ranks is read line by line, and no rank has a terminal.
    # False: ranks share the output of this process, and rank 0 its input.
    captured: bool = True
    # Hosts keep the packed weights of their ranks for the next run.
    keeps: bool = False

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Job":
        """Creates a job from its fields by name, as an agent receives them."""
        return Job(**{**values, "command": tuple(values["command"])})

    def rank_environment(self, rank: int, first: int, local: int, descriptors: Mapping[int, int]) -> dict[str, str]:
        """Returns the environment of one rank.

        Variables of another launcher are removed. The folder of this Python comes first in PATH, so that `ckdist` and
        `python` are the launcher's own.

        Args:
            first: First rank of the host.
            local: Number of ranks of the host.
            descriptors: Peer -> descriptor that the rank inherits.
        """
        result = {name: value for name, value in os.environ.items() if name not in _REPLACED} | self.environment
        own = str(pathlib.Path(sys.executable).parent)
        result["PATH"] = os.pathsep.join([own, result.get("PATH", os.defpath)])
        result.setdefault("PYTHONUNBUFFERED", "1")  # lines arrive as they are written
        if self.size == 1:
            return result
        own_variables = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank - first, "LOCAL_WORLD_SIZE": local}
        return {**result, **{k: str(v) for k, v in own_variables.items()}, CONNECTIONS_VARIABLE: describe(descriptors)}
