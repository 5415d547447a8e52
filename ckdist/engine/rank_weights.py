"""A rank's part of a model's weights: planned, then in an arena, then found by execution plans."""

from typing import TYPE_CHECKING

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError
from ckdist.layouts.memory_sizes import WeightBytes
from ckdist.models.moe_weights import is_expert
from ckdist.program.execution_plan import ExecutionPlan
from ckdist.program.lowered import Lowered, MatrixKey, VectorKey
from ckdist.topology import Placement, bind_memory
from ckdist.weights.dtypes import BY_NUMBER
from ckdist.weights.handles import MatrixHandle, VectorHandle
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import is_low_rank

if TYPE_CHECKING:
    from ckdist.weights.adapter import Adapter
    from ckdist.weights.adapter_slots import AdapterSlots
    from ckdist.weights.host_shards import HostShards
    from ckdist.weights.packed_matrix import PackedMatrix, SlotMatrix


class RankWeights:
    """The weights that lowered programs read on this rank.

    Attributes:
        shards: The weights of all ranks of the host, if a program reads them.
    """

    def __init__(self, loader: ShardLoader, adapter: "Adapter | AdapterSlots | None") -> None:
        self.loader, self.adapter = loader, adapter
        self.shards: HostShards | None = None
        self._matrices: dict[MatrixKey, MatrixHandle | PackedMatrix | SlotMatrix] = {}
        self._vectors: dict[VectorKey, VectorHandle] = {}

    def add(self, lowered: Lowered) -> None:
        """Plans this rank's part of every weight of a lowered program, in the loader or the adapter.

        Columns are widened to whole blocks.
        """
        for key in lowered.matrices:
            if is_low_rank(key.name):
                self._matrices[key] = self._low_rank(key)
            elif not lowered.adapters:
                self._matrices[key] = self._add_matrix(key)
        if lowered.adapters:  # its other weights are those of the programs without adapters
            return
        for key in lowered.vectors:
            name, local_range = key
            self._vectors[key] = self.loader.add_vector(name, *local_range)

    def sizes(self) -> WeightBytes:
        """The planned bytes."""
        total = self.loader.planned_bytes + (self.adapter.bytes if self.adapter else 0)
        experts = dict.fromkeys(handle for key, handle in self._matrices.items() if is_expert(key.name))
        kept = self.loader.kept.find(self.loader) if self.loader.kept else 0
        return WeightBytes(total, sum(BY_NUMBER[h.type].row_bytes(h.rows * h.cols) for h in experts), kept)

    def open(self, placement: Placement, stage: World, shared: bool) -> None:
        """Opens the arena where this rank's threads run. A collective call of the stage's ranks.

        `shared`: Some steps read the weights of all ranks of the host.
        """
        placement.enter()
        bind_memory(placement)
        self.loader.open(shared=shared)
        if shared:
            from ckdist.weights.host_shards import HostShards

            own = {key: handle for key, handle in self._matrices.items() if isinstance(handle, MatrixHandle)}
            self.shards = HostShards(stage, self.loader, own, self._vectors)

    def plan(self, lowered: Lowered) -> ExecutionPlan:
        """The execution plan of a lowered program, before weights are packed.

        Steps with sharded tokens read the weights of all ranks.
        """
        if self.shards is None or not lowered.tokens_sharded:
            matrices = [self._matrices[key].address for key in lowered.matrices]
            return ExecutionPlan(lowered, matrices, [self._vectors[key].address for key in lowered.vectors])
        matrices = [
            self._low_rank(key).address if is_low_rank(key.name) else self.shards.matrix(key)
            for key in lowered.matrices
        ]
        return ExecutionPlan(lowered, matrices, [self.shards.vector(*key) for key in lowered.vectors])

    def _low_rank(self, key: MatrixKey) -> "PackedMatrix | SlotMatrix":
        assert self.adapter is not None  # the program was traced with one
        return self.adapter.matrix(key)

    def _add_matrix(self, key: MatrixKey) -> MatrixHandle:
        name, rows, (begin, end), stack = key
        block = native.lib.ckdist_type_undivided_columns(self.loader.type_of(name))
        last = self.loader.checkpoint.tensors[name].shape[-1]
        columns = (begin // block * block, min(-(-end // block) * block, last)) if end > begin else (0, 0)
        return self.loader.add_matrix(name, [rows], columns, stack)


def check_quantize(loader: ShardLoader, lowered: Lowered, world: World) -> None:
    """Raises ConfigError if --quantize would change no weight on any rank. A collective call.

    The weights are then quantised already, or no row consists of whole blocks.
    """
    names = [key.name for key in lowered.matrices if not is_low_rank(key.name)]
    sources = {name: loader.checkpoint.tensors[name] for name in names}
    changes = any(loader.type_of(name) != source.type for name, source in sources.items())
    if loader.quantize is None or any(world.gather(changes)):
        return
    types = ", ".join(sorted({BY_NUMBER[source.type].name for source in sources.values()}))
    raise ConfigError(
        f"--quantize {loader.quantize} changes nothing in {loader.checkpoint.path}, whose matrices are {types}: "
        "it packs rows of F32, F16 or BF16 that its blocks divide; leave it out"
    )
