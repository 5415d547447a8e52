"""One rank of a loaded model."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckdist.comm.world_protocol import World
from ckdist.errors import CkdistError, NativeError, UserError
from ckdist.layouts.prefill_choice import PrefillChoice
from ckdist.layouts.rank_plan import Plan
from ckdist.models.spec import ModelSpec
from ckdist.program.executable import Executable
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.loader import ShardLoader

if TYPE_CHECKING:
    from ckdist.engine.disk_cache import DiskCache
    from ckdist.engine.named_adapters import Adapters
    from ckdist.engine.trace import Labels, Trace
    from ckdist.weights.adapter import Adapter
    from ckdist.weights.adapter_slots import AdapterSlots
    from ckdist.weights.host_shards import HostShards


@dataclass
class Model:
    """One rank of a loaded model.

    `loader` and `adapter` own this rank's weights. `shards` finds weights of other ranks on the host. All must outlive
    `executable`.
    """

    world: World
    checkpoint: Checkpoint
    plan: Plan
    loader: ShardLoader
    shards: "HostShards | None"
    adapter: "Adapter | AdapterSlots | None"
    executable: Executable
    weight_bytes: int  # of this rank
    trace: "Trace | None"
    prefill: PrefillChoice = field(default_factory=PrefillChoice)
    decode_threads: str = ""  # the choice of threads and its reason, in a few words; "": all are used
    total_weight_bytes: int = 0  # of all ranks
    disk: "DiskCache | None" = None
    adapters: "Adapters | None" = None  # those that requests name
    draft: "Model | None" = None  # the draft model

    @property
    def spec(self) -> ModelSpec:
        """The model, with the layers of all stages."""
        return self.checkpoint.spec

    def work(self) -> None:
        """Ranks other than 0: executes rank 0's commands until it stops."""
        while (command := self.executable.worker.work())[0] != "stop":
            if command[0] != "adapt" or self.adapters is None:
                raise NativeError(f"rank 0 sent {command[0]} for model {command[1]}, which this loop does not execute")
            self.adapters.follow()

    def close(self) -> None:
        """Frees the model and the job's worker. Rank 0 first stops the other ranks.

        If there is a trace, it is written, and all ranks must take part.
        """
        if self.world.rank == 0:
            self.executable.stop()
        if self.adapters is not None:
            self.adapters.close()
        if self.trace is not None:
            self.trace.save(self._labels())
        worker = self.executable.worker
        worker.close()
        if self.draft is not None:
            self.draft.free()
        self.free()
        worker.communicator.close()

    def free(self) -> None:
        """Frees weights, cache and buffers. The worker must not know the model any longer."""
        self.executable.close()
        if self.disk is not None:
            self.disk.folder.close()
        if self.executable.stages is not None:
            self.executable.stages.communicator.close()
        if self.executable.communicator is not self.executable.worker.communicator:
            self.executable.communicator.close()
        self.loader.free()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Writes rank 0's part of a trace if the `with` block raises."""
        try:
            yield
        except BaseException:
            if self.trace is not None:
                self.trace.save_own(self._labels())
            raise

    @contextlib.contextmanager
    def dismissing(self) -> Iterator[None]:
        """Ends the other ranks in order if rank 0 raises a UserError between steps.

        The other ranks are well and wait for the next batch. If a step failed, nothing is closed.
        """
        try:
            yield
        except UserError:
            if not self.executable.failed:
                with contextlib.suppress(CkdistError):
                    self.close()
                    self.world.close()
            raise

    def _labels(self) -> "Labels":
        """Per plan of the executable: its name in a trace, and the names and layers of its steps."""
        executable = self.executable
        both = executable.has_logits and executable.has_hidden
        names = [
            ("hidden states, " if key.hidden and both else "adapters, " if key.adapted else "")
            + ("rows by host" if key.by_host else "prefill by tokens" if key.sharded else "prefill")
            + (" by tensors" if self.world.size > 1 and not key.by_host and not key.sharded else "")
            for key in executable.keys
        ]
        return list(zip(names, executable.labels, strict=True))
