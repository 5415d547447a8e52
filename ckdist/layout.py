"""How work is sharded over ranks: one small table that says which named dimension each axis of the mesh shards.

One rule shards everything, for any number of ranks: contiguous ranges of whole units, as even as can be; a rank may get
nothing. Key-value heads follow the query heads that need them, so they are replicated where there are fewer than ranks.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ckdist.errors import LayoutError
from ckdist.mesh import HOST, LOCAL, WHOLE, Mesh

Range = tuple[int, int]


def even_ranges(size: int, parts: int, unit: int = 1) -> list[Range]:
    """`parts` contiguous ranges that cover [0, size), each a whole number of units but for the last, sizes as even as
    can be.

    With fewer units than parts some ranges are empty, never the first: what one rank must do alone falls to rank 0.
    """
    units = -(-size // unit)
    bounds = [min(size, unit * -(-units * i // parts)) for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Dim:
    """A named dimension of `size` items of `width` elements each: heads=16x128 is 2048 elements that are sharded head
    by head.

    `size` is None for the one symbolic dimension, tokens. `axis` is the mesh axis that shards it, or None. `unit` is
    the number of items that stay together. `leader`, for a dimension that follows another's sharding, is (size, unit,
    items of the leader per own item).
    """

    name: str
    size: int | None
    width: int = 1
    axis: str | None = None
    unit: int = 1
    leader: tuple[int, int, int] | None = None

    @property
    def count(self) -> int:
        """Items of the whole dimension. LayoutError for the symbolic one."""
        if self.size is None:
            raise LayoutError(f"the number of {self.name} is known only in a step")
        return self.size

    @property
    def elements(self) -> int:
        """Elements of the whole dimension. LayoutError for the symbolic one."""
        return self.count * self.width

    def share(self, mesh: Mesh) -> Range:
        """This rank's items, [begin, end). LayoutError for the symbolic dimension."""
        if self.axis is None:
            return 0, self.count
        parts, index = mesh.size(self.axis), mesh.index(self.axis)
        if self.leader is None:
            return even_ranges(self.count, parts, self.unit)[index]
        size, unit, group = self.leader
        begin, end = even_ranges(size, parts, unit)[index]
        return (begin // group, -(-end // group)) if begin < end else (begin // group, begin // group)

    def span(self, mesh: Mesh) -> Range:
        """This rank's elements, [begin, end)."""
        begin, end = self.share(mesh)
        return begin * self.width, end * self.width

    def local(self, mesh: Mesh) -> int:
        """Elements that this rank holds."""
        begin, end = self.span(mesh)
        return end - begin

    def __str__(self) -> str:
        size = "" if self.size is None else f"={self.size}" + (f"x{self.width}" if self.width > 1 else "")
        return f"{self.name}{size}{'/' + self.axis if self.axis else ''}"


@dataclass(frozen=True)
class Layout:
    """Which mesh axis shards which named dimension; a dimension that is not named is replicated on every rank."""

    name: str
    sharded_by: Mapping[str, str]

    def axis(self, dim: str, mesh: Mesh) -> str | None:
        """The axis that shards `dim`; None where none does, or only one rank is along it.

        LayoutError where the mesh lacks the axis.
        """
        axis = self.sharded_by.get(dim)
        if axis is not None and axis not in mesh.axes and axis != WHOLE:
            raise LayoutError(
                f"layout {self.name} shards {dim} over {axis!r}, but the mesh has only {', '.join(mesh.axes)}"
            )
        return axis if axis is not None and mesh.size(axis) > 1 else None


SINGLE = Layout("SINGLE", {})
TENSOR = Layout("TENSOR", {"heads": "tp", "kv_heads": "tp", "ffn": "tp", "expert_ffn": "tp", "vocab": "tp"})
DATA = Layout("DATA", {"tokens": "dp"})
# Training: of the ranks of a dp group each has its own sequences, of those of a tp group its shard of the matrices.
TRAINING = Layout("TRAINING", {**DATA.sharded_by, **TENSOR.sharded_by})
# Prefill: each rank has its share of a step's tokens and whole matrices; the logits of the few tokens that want them
# are sharded as in TENSOR.
TOKEN = Layout("TOKEN", {"tokens": "tp", "outputs": "tp", "vocab": "tp"})

# The same where ranks are on several hosts (axes host and local): tokens are sharded over a host's ranks, and matrices
# over the hosts.
TOKEN_IN_HOSTS = Layout(
    "TOKEN in hosts",
    {
        "tokens": "local",
        "outputs": "local",
        "heads": "host",
        "kv_heads": "host",
        "ffn": "host",
        "expert_ffn": "host",
        "vocab": "tp",
    },
)


def with_whole_experts(layout: Layout, hosts: bool) -> Layout:
    """The layout with whole experts: by rank, or where ranks of a host share memory (`hosts`) by host, of whose ranks
    each has a slice, as TENSOR and TOKEN in hosts have of other matrices.
    """
    by_tokens = "tokens" in layout.sharded_by
    own = {"experts": HOST if hosts else WHOLE} | ({"expert_ffn": LOCAL} if hosts and not by_tokens else {})
    others = {dim: axis for dim, axis in layout.sharded_by.items() if dim != "expert_ffn"}
    return Layout(f"{layout.name} by experts", others | own)


FFN_UNIT = 32  # columns of the down projection that stay together: the smallest quantisation block


VOCAB_UNIT = 16  # rows of a tile


def head_dims(heads: int, kv_heads: int, width: int, axis: str | None, mesh: Mesh) -> tuple[Dim, Dim]:
    """Heads and kv_heads of `width` elements each, sharded over `axis`.

    Query heads are sharded by whole groups (those that share a kv-head) while there are at least as many groups as
    ranks in all, else head by head, and then a kv-head is held by every rank that has one of its query heads. So what a
    host has are the shares of its ranks.
    """
    group = heads // kv_heads
    unit = group if axis is None or kv_heads >= mesh.size(WHOLE) else 1
    return Dim("heads", heads, width, axis, unit), Dim("kv_heads", kv_heads, width, axis, leader=(heads, unit, group))


@dataclass(frozen=True)
class Sharding:
    """A layout on a mesh: it makes the named dimensions of a model's parts from their sizes."""

    layout: Layout
    mesh: Mesh

    def axis(self, dim: str) -> str | None:
        """The mesh axis that shards the dimension of this name, or None."""
        return self.layout.axis(dim, self.mesh)

    @property
    def tokens(self) -> Dim:
        """The tokens of a step: the one symbolic dimension."""
        return Dim("tokens", None, axis=self.axis("tokens"))

    @property
    def outputs(self) -> Dim:
        """The tokens of a step whose logits are wanted."""
        return Dim("outputs", None, axis=self.axis("outputs"))

    def hidden(self, size: int) -> Dim:
        """The residual stream."""
        return Dim("hidden", size, axis=self.axis("hidden"))

    def ffn(self, size: int) -> Dim:
        """The columns of a down projection."""
        return Dim("ffn", size, 1, self.axis("ffn"), FFN_UNIT)

    def experts(self, count: int) -> Dim:
        """The experts of a layer."""
        return Dim("experts", count, axis=self.axis("experts"))

    def expert_ffn(self, size: int) -> Dim:
        """The columns of an expert's down projection."""
        return Dim("ffn", size, 1, self.axis("expert_ffn"), FFN_UNIT)

    def vocab(self, size: int) -> Dim:
        """The rows of the embeddings."""
        return Dim("vocab", size, 1, self.axis("vocab"), VOCAB_UNIT)

    def heads(self, heads: int, kv_heads: int, width: int) -> tuple[Dim, Dim]:
        """Heads and kv_heads of `width` elements each: see `head_dims`."""
        return head_dims(heads, kv_heads, width, self.axis("heads"), self.mesh)
