"""What lowering makes of a program that serves: the executor's steps, and the buffers and weights they work on."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ckdist.layout import Range, even_ranges
from ckdist.mesh import Mesh
from ckdist.program.program import Instr
from ckdist.program.step import ABSENT, MatrixIndex, Step, VectorIndex

RANK_UNIT = 16  # low ranks are computed in whole tiles, and the next matrix reads them at the beginning of a cache line
SLOTS = 2  # partial values alternate between this many exchange buffers
LATENT_GROUP = 8  # heads that read a latent vector together


class MatrixKey(NamedTuple):
    """A part of a weight: rows and columns, [begin, end); of a stack those of each of its `matrices`."""

    name: str
    rows: Range
    columns: Range
    matrices: Range | None = None  # None: of a stack all


VectorKey: TypeAlias = tuple[str, Range]  # name, elements


@dataclass(frozen=True)
class Buffer:
    """Where a step's value lies: `struct ckdist_value`, with `place` a name of `enum ckdist_place`.

    `width` in floats from row to row (activations: columns of the matrix), `lead` columns before the value's own,
    `floats` (of activations) those that it takes from its source, `rows` how many there are at most. `selected`: its
    rows are those whose logits are wanted, not tokens. `sum`: the buffer that gets the sums over the hosts, of the rows
    that this host has.
    """

    place: str
    width: int
    offset: int = 0
    format: int = 0
    lead: int = 0
    floats: int = 0
    rows: int = 0
    selected: bool = False
    sum: int = ABSENT


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer on this rank: how many of its query heads share each of its kv-heads, and their widths."""

    heads_per_kv: tuple[int, ...]
    key_width: int
    value_width: int
    total_heads: int  # of all ranks
    total_kv_heads: int
    first_head: int
    # where the row of a token's rank has each kv-head, counted in heads; where heads are shared, some stand there twice
    key_places: tuple[int, ...] = ()
    latent: bool = (
        False  # its "kv-heads" are groups of heads that all read one cached vector, whose beginning is the value
    )


def layer_of(weight: str) -> int | None:
    """The layer of a weight, by its name; None before the first and after the last."""
    found = re.search(r"layers\.(\d+)\.", weight)
    return int(found[1]) if found else None


def layer_attention(attend: Instr, mesh: Mesh) -> LayerAttention:
    """What an attend means on a rank of `mesh`."""
    heads, keys, values = (x.dims[-1] for x in attend.inputs)
    group = heads.count // keys.count
    begin, end = heads.share(mesh)
    each = (min(end, (kv + 1) * group) - max(begin, kv * group) for kv in range(*keys.share(mesh)))
    return LayerAttention(tuple(each), keys.width, values.width, heads.count, keys.count, begin)


def latent_attention(attend: Instr, mesh: Mesh) -> LayerAttention:
    """What an attend_latent means on a rank of `mesh`: its heads, in groups that a thread attends for at once."""
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
    """What one layer keeps of a sequence on this rank: `key_head_of` says of each of its value heads which local key
    head it reads. `taps`: tokens that the short convolutions see.
    """

    key_head_of: tuple[int, ...]
    key_width: int
    value_width: int
    taps: int


@dataclass
class Lowered:
    """`matrices[i]` is a part of a matrix and `vectors[i]` (weight name, elements), as [begin, end): this
    rank's, or where tokens are sharded any rank's. `exchange_floats`: what a slot holds at most, on any rank.
    `attention[layer]`: what a layer caches of tokens, `states[layer]`: of sequences; a layer has one of both.
    `layer_steps`: the steps up to the end of the first layer. `tokens_sharded`: every rank has its range of a step's
    tokens. `host_rows`: whether hosts share out a rank's tokens between the products that need all of them.
    `experts[layer]`: how many a layer has.
    """

    steps: list[Step]
    buffers: list[Buffer]
    matrices: list[MatrixKey]
    vectors: list[VectorKey]
    arena_bytes: int
    exchange_floats: int
    attention: dict[int, LayerAttention]
    states: dict[int, LayerState]
    layer_steps: int
    tokens_sharded: bool
    host_rows: str = "none"
    experts: dict[int, int] = field(default_factory=dict)

    def labels(self) -> list[tuple[str, int | None]]:
        """For each step its kind with what it multiplies by, and its layer, None before the first and after the
        last.
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
    """A buffer without what depends on how much memory others take."""
    numbers = {name: getattr(buffer, name) for name in ("width", "format", "lead", "floats", "rows")}
    if buffer.place not in ("arena", "activations"):
        numbers["offset"] = buffer.offset
    shown = [f"{name}={number}" for name, number in numbers.items() if number]
    more = [*(["selected"] if buffer.selected else []), *([f"sum=v{buffer.sum}"] if buffer.sum != ABSENT else [])]
    return " ".join([buffer.place, *shown, *more])
