"""A lightning indexer: small heads score all positions. Attention reads the positions with the largest scores."""

from dataclasses import dataclass, replace

from ckdist.layout import Dim
from ckdist.models.indexers import Indexer
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer


@dataclass(frozen=True)
class IndexWeights:
    """The weights of an indexer."""

    sizes: Indexer
    # make the key, the weights of heads and, with windows, the gate of the key from the rows that the layer reads
    rows: tuple[Weight, ...]
    queries: Weight  # makes the queries from the low rank of the layer's queries
    norm: tuple[Weight, Weight]
    pool: tuple[Weight, ...]  # the bias of gates, if there are windows

    def select(self, g: Tracer, q: Value, k: Value, weights: Value, *gates: Value, layer: int) -> Value:
        """The positions that each token sees, by the queries, keys and weights of heads of all tokens.

        Scores lack positive constants, which change no order.
        """
        rope, top_k, pool, eps = self.sizes.rope, self.sizes.top_k, self.sizes.pool, self.sizes.norm_eps
        k = g.layer_norm(k, *self.norm, eps)
        if pool:
            attrs = {"index_top_k": top_k // pool, "ratio": pool, "overlap": False, "rope": rope, "eps": eps}
            operands = (q, weights, k, *gates)
            (positions,) = g.stateful(
                "select_entries", operands, self.pool, ["positions"], layer=layer, positions=True, **attrs
            )
            return positions
        q, k = (x if rope is None else g.rope(x, rope, self.sizes.rope_first) for x in (q, k))
        return g.select_positions(q, k, weights, layer=layer, index_top_k=top_k)


def index_weights(g: Tracer, i: Indexer, path: str, hidden: Dim, q_rank: Dim) -> IndexWeights:
    """`path` is the prefix of the weights' names."""
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    heads, key = Dim("index_heads", i.num_heads, i.head_dim), Dim("index", 1, i.head_dim)
    rows = w("wk.weight", key, hidden), w("weights_proj.weight", replace(heads, width=1), hidden)
    pool: tuple[Weight, ...] = ()
    if i.pool:
        rows += (w("pool_gate.weight", key, hidden),)
        pool = (w("pool_bias", Dim("bias", i.pool * i.head_dim)),)
    norm = w("k_norm.weight", key), w("k_norm.bias", key)
    return IndexWeights(i, rows, w("wq_b.weight", heads, q_rank), norm, pool)
