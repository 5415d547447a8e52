"""The index of a layer with heads: it scores positions, and attention reads the blocks with the largest scores."""

from collections.abc import Callable
from typing import Any

from ckdist.layout import Dim
from ckdist.models.block_indexer import BlockIndexer
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer


def select_blocks(
    g: Tracer,
    i: BlockIndexer,
    w: Callable[..., Weight],
    q: Value,
    k: Value,
    layer: int,
    rope: str | None,
    eps: float,
) -> dict[str, Any]:
    """The blocks that each token sees, as arguments of `attend`. q and k are neither normed nor rotated."""
    head = Dim("head_dim", i.head_dim)
    q, k = (g.rms_norm(x, w(f"index_{n}_norm.weight", head), eps) for n, x in (("q", q), ("k", k)))
    if rope is not None:
        q, k = g.rope(q, rope), g.rope(k, rope)
    sizes = {"block": i.block, "top_k": i.top_k, "local": i.local}
    (blocks,) = g.stateful("select_blocks", (q, k), (), ["blocks"], layer=layer, **sizes)
    return {"positions": blocks, "listed_block": i.block}
