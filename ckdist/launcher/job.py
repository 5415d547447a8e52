"""What is started: a command as so many ranks, and what each of them finds in its environment."""

import os
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckdist.comm.bootstrap.launched_world import CONNECTIONS_VARIABLE, describe
from ckdist.comm.bootstrap.launchers import RANK_VARIABLES


@dataclass(frozen=True)
class Job:
    """`command` as ranks 0 to size - 1, in `folder`, with `environment` on top of each host's own.

    `captured`: the ranks' output is read line by line, and none has a terminal; else they share this process's, and
    rank 0 its input.
    """

    command: tuple[str, ...]
    size: int
    folder: str
    environment: dict[str, str] = field(default_factory=dict[str, str])
    captured: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Its fields by name."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Job":
        """What `as_dict` gave."""
        return Job(**{**values, "command": tuple(values["command"])})

    def rank_environment(self, rank: int, first: int, local: int, descriptors: Mapping[int, int]) -> dict[str, str]:
        """The environment of one rank, of `local` on its host from `first` on, which inherits `descriptors`.

        What another launcher has told this process is not passed on. The folder of this Python comes first in PATH, so
        `ckdist` and `python` are the launcher's own.
        """
        result = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | self.environment
        own = str(pathlib.Path(sys.executable).parent)
        result["PATH"] = os.pathsep.join([own, result.get("PATH", os.defpath)])
        result.setdefault("PYTHONUNBUFFERED", "1")  # lines come as they are written
        if self.size == 1:
            return result
        told = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank - first, "LOCAL_WORLD_SIZE": local}
        return {**result, **{k: str(v) for k, v in told.items()}, CONNECTIONS_VARIABLE: describe(descriptors)}
