"""Sharding of work over ranks: a layout is a table from named dimensions to the mesh axes that shard them.

Each sharded dimension is divided into contiguous ranges of whole units, for any number of ranks. Their lengths are
nearly equal, or in proportion to the mesh's shares. A rank may get an empty range. Key-value heads follow the query
heads that need them, so they are replicated if there are fewer of them than ranks.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckdist.errors import LayoutError
from ckdist.mesh import HOST, LOCAL, WHOLE, Mesh

Range = tuple[int, int]


def even_ranges(size: int, parts: int, unit: int = 1) -> list[Range]:
    """Splits [0, size) into contiguous ranges of nearly equal length.

    Args:
        size: End of the last range.
        parts: Number of ranges.
        unit: Items that stay together; only the last range may have a partial unit.

    Returns:
        `parts` ranges. Some are empty if there are fewer units than parts, but never the first: rank 0 always has work.
    """
    return ranges_by_shares(size, (1,) * parts, unit)


def ranges_by_shares(size: int, shares: Sequence[int], unit: int = 1, least: int = 0) -> list[Range]:
    """As `even_ranges`, with a range for each of `shares`, whose length is in proportion to it.

    Neighbours together are the range of the sum of their shares. `least`: units of each range, if there are enough.
    """
    units, total, ends = -(-size // unit), sum(shares), [0]
    least = min(least, units // len(shares))
    for later, end in zip(range(len(shares) - 1, -1, -1), itertools.accumulate(shares), strict=True):
        ends.append(min(max(-(-units * end // total), ends[-1] + least), units - later * least))
    return list(itertools.pairwise(min(size, unit * end) for end in ends))


_kept_ranges = functools.lru_cache(1 << 10)(ranges_by_shares)  # a program's weights share few divisions


@dataclass(frozen=True)
class Dim:
    """A named dimension of `size` items of `width` elements each.

    For example, heads=16x128 has 2048 elements and is sharded by whole heads.
    """

    name: str
    size: int | None  # None: symbolic, the number of tokens of a step
    width: int = 1
    axis: str | None = None  # the mesh axis that shards it
    unit: int = 1  # items that stay together
    least: int = 0  # units that each rank has at least, if there are enough
    # if it follows the sharding of another dimension: (size, unit, items per own item) of that dimension
    leader: tuple[int, int, int] | None = None

    @property
    def count(self) -> int:
        """Items of the whole dimension. Raises LayoutError if it is symbolic."""
        if self.size is None:
            raise LayoutError(f"the number of {self.name} is known only in a step")
        return self.size

    @property
    def elements(self) -> int:
        """Elements of the whole dimension. Raises LayoutError if it is symbolic."""
        return self.count * self.width

    def share(self, mesh: Mesh) -> Range:
        """This rank's items, [begin, end). Raises LayoutError if the dimension is symbolic."""
        if self.axis is None:
            return 0, self.count
        shares, index = mesh.shares_along(self.axis), mesh.index(self.axis)
        if self.leader is None:
            return _kept_ranges(self.count, shares, self.unit, self.least)[index]
        size, unit, group = self.leader
        begin, end = _kept_ranges(size, shares, unit)[index]
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
    """A table from dimension names to the mesh axes that shard them. All other dimensions are replicated."""

    name: str
    sharded_by: Mapping[str, str]

    def axis(self, dim: str, mesh: Mesh) -> str | None:
        """The axis that shards `dim`; None if no axis does, or if it has only one rank.

        Raises LayoutError if the mesh lacks the axis.
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
# Training: the ranks of a dp group have different sequences, those of a tp group have different shards of matrices.
TRAINING = Layout("TRAINING", {**DATA.sharded_by, **TENSOR.sharded_by})
# Prefill: each rank has a range of a step's tokens, and whole matrices. Logits, needed for few tokens, are sharded as
# in TENSOR.
TOKEN = Layout("TOKEN", {"tokens": "tp", "outputs": "tp", "vocab": "tp"})

# TOKEN for several hosts (axes host and local): tokens are sharded over the ranks of a host, matrices over hosts.
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
    """A layout in which whole experts are sharded, in place of the columns of each expert.

    Experts are sharded over all ranks. If `hosts` (ranks of a host share memory), they are sharded over hosts. Each
    rank then has a slice of each of its host's experts, unless the layout shards tokens.
    """
    by_tokens = "tokens" in layout.sharded_by
    own = {"experts": HOST if hosts else WHOLE} | ({"expert_ffn": LOCAL} if hosts and not by_tokens else {})
    others = {dim: axis for dim, axis in layout.sharded_by.items() if dim != "expert_ffn"}
    return Layout(f"{layout.name} by experts", others | own)


FFN_UNIT = 32  # columns of the down projection that stay together: the smallest quantisation block


VOCAB_UNIT = 16  # rows that stay together: a tile


def head_dims(heads: int, kv_heads: int, width: int, axis: str | None, mesh: Mesh) -> tuple[Dim, Dim]:
    """The dimensions of query heads and kv-heads, of `width` elements each, sharded over `axis`.

    A group is the query heads that share a kv-head. Query heads are sharded by groups if the number of groups is at
    least that of ranks in the mesh, else by single heads. Each rank has the kv-heads of its query heads. Since the
    number of all ranks decides, a host always has the heads of its ranks.
    """
    group = heads // kv_heads
    unit = group if axis is None or kv_heads >= mesh.size(WHOLE) else 1
    return Dim("heads", heads, width, axis, unit), Dim("kv_heads", kv_heads, width, axis, leader=(heads, unit, group))


@dataclass(frozen=True)
class Sharding:
    """A layout on a mesh. It makes the named, sharded dimensions of a model."""

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
        """The tokens of a step whose logits are needed."""
        return Dim("outputs", None, axis=self.axis("outputs"))

    def hidden(self, size: int) -> Dim:
        """The residual stream."""
        return Dim("hidden", size, axis=self.axis("hidden"))

    def ffn(self, size: int) -> Dim:
        """The columns of a down projection."""
        return Dim("ffn", size, 1, self.axis("ffn"), FFN_UNIT)

    def experts(self, count: int) -> Dim:
        """The experts of a layer."""
        return Dim("experts", count, axis=self.axis("experts"), least=1)

    def expert_ffn(self, size: int) -> Dim:
        """The columns of an expert's down projection."""
        return Dim("ffn", size, 1, self.axis("expert_ffn"), FFN_UNIT)

    def vocab(self, size: int) -> Dim:
        """The rows of the embeddings."""
        return Dim("vocab", size, 1, self.axis("vocab"), VOCAB_UNIT)

    def heads(self, heads: int, kv_heads: int, width: int) -> tuple[Dim, Dim]:
        """The dimensions of query heads and kv-heads, as `head_dims` makes them."""
        return head_dims(heads, kv_heads, width, self.axis("heads"), self.mesh)
