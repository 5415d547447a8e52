"""A program lowered for serving: the executor's steps, with their buffers and weights."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ckdist.layout import Range, even_ranges
from ckdist.mesh import Mesh
from ckdist.program.program import Instr
from ckdist.program.step import ABSENT, MatrixIndex, Step, VectorIndex

RANK_UNIT = 16  # LoRA ranks are padded to whole tiles; the next matrix reads them from the start of a cache line
SLOTS = 2  # partial values alternate between this many exchange buffers
LATENT_GROUP = 8  # heads that read a latent vector together


class MatrixKey(NamedTuple):
    """A part of a weight. In a stack, rows and columns are those of each of its `matrices`."""

    name: str
    rows: Range
    columns: Range
    matrices: Range | None = None  # None: all matrices of a stack


VectorKey: TypeAlias = tuple[str, Range]  # name, elements


@dataclass(frozen=True)
class Buffer:
    """The place of a step's value: `struct ckdist_value`."""

    place: str  # a name of `enum ckdist_place`
    width: int  # floats from row to row; for activations: columns of the matrix
    offset: int = 0
    format: int = 0
    lead: int = 0  # columns before the value's own
    floats: int = 0  # for activations: columns that come from the source, the others are zero
    rows: int = 0  # upper bound on the number of rows
    selected: bool = False  # rows are those whose logits are needed, not tokens
    sum: int = ABSENT  # buffer for the sums over hosts, with the rows of this host


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer on this rank."""

    heads_per_kv: tuple[int, ...]  # for each kv-head of this rank: number of its query heads here
    key_width: int
    value_width: int
    total_heads: int  # on all ranks
    total_kv_heads: int  # on all ranks
    first_head: int
    # index of each kv-head in the row of a token's rank; that row has a kv-head twice if ranks replicate it
    key_places: tuple[int, ...] = ()
    # "kv-heads" are groups of heads that read one cached vector; its first elements are the value
    latent: bool = False


def layer_of(weight: str) -> int | None:
    """The layer number in a weight's name; None if it belongs to no layer."""
    found = re.search(r"layers\.(\d+)\.", weight)
    return int(found[1]) if found else None


def layer_attention(attend: Instr, mesh: Mesh) -> LayerAttention:
    """The attention that an `attend` computes on a rank of `mesh`."""
    heads, keys, values = (x.dims[-1] for x in attend.inputs)
    group = heads.count // keys.count
    begin, end = heads.share(mesh)
    each = (min(end, (kv + 1) * group) - max(begin, kv * group) for kv in range(*keys.share(mesh)))
    return LayerAttention(tuple(each), keys.width, values.width, heads.count, keys.count, begin)


def latent_attention(attend: Instr, mesh: Mesh) -> LayerAttention:
    """The attention that an `attend_latent` computes on a rank of `mesh`. A thread computes a group of heads."""
    heads, key = (x.dims[-1] for x in attend.inputs)
    begin, end = heads.share(mesh)
    groups = (
        [stop - start for start, stop in even_ranges(end - begin, -(-(end - begin) // LATENT_GROUP))]
        if end > begin
        else []
    )
    width = attend.outputs[0].dims[-1].width
    return LayerAttention(tuple(groups), key.elements, width, heads.count, 1, begin, latent=True)


@dataclass(frozen=True)
class LayerState:
    """The state that one layer keeps for a sequence on this rank."""

    key_head_of: tuple[int, ...]  # for each value head: the local key head that it reads
    key_width: int
    value_width: int
    taps: int  # kernel length of the short convolutions, in tokens


@dataclass
class Lowered:
    """A lowered program. Its weights are shards of this rank, or of any rank of the host if tokens are sharded."""

    steps: list[Step]
    buffers: list[Buffer]
    matrices: list[MatrixKey]
    vectors: list[VectorKey]
    arena_bytes: int
    exchange_floats: int  # floats of an exchange slot: the maximum over all ranks
    attention: dict[int, LayerAttention]  # by layer; a layer is in `attention` or in `states`
    states: dict[int, LayerState]
    layer_steps: int  # steps up to the end of the first layer
    tokens_sharded: bool  # each rank has a range of a step's tokens
    host_rows: str = "none"  # a name of `enum ckdist_host_rows`: whether hosts share out a rank's rows
    experts: dict[int, int] = field(default_factory=dict)  # layer -> number of experts

    def labels(self) -> list[tuple[str, int | None]]:
        """For each step (its kind and the names of its matrices, its layer).

        The layer is None before the first and after the last layer.
        """
        found: list[tuple[str, int | None]] = []
        layer: int | None = None
        for s in self.steps:
            weights = [self.matrices[i][0] for i in s.operands(MatrixIndex)]
            norms = [self.vectors[i][0] for i in s.operands(VectorIndex)]
            layers = [number for name in weights + norms if (number := layer_of(name)) is not None]
            layer = s.fields.get("layer", layers[-1] if layers else None if weights or norms else layer)
            parts = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in weights)
            found.append((" ".join([s.kind, *parts]), layer))
        return found

    def __str__(self) -> str:
        buffers = [f"   v{i} {_text(buffer)}" for i, buffer in enumerate(self.buffers)]
        return "\n".join([*(f"{i:4d} {step}" for i, step in enumerate(self.steps)), *buffers]) + "\n"


def _text(buffer: Buffer) -> str:
    """A buffer as text, without offsets that depend on the sizes of other buffers."""
    numbers = {name: getattr(buffer, name) for name in ("width", "format", "lead", "floats", "rows")}
    if buffer.place not in ("arena", "activations"):
        numbers["offset"] = buffer.offset
    shown = [f"{name}={number}" for name, number in numbers.items() if number]
    more = [*(["selected"] if buffer.selected else []), *([f"sum=v{buffer.sum}"] if buffer.sum != ABSENT else [])]
    return " ".join([buffer.place, *shown, *more])
