"""Attention to a window of keys and to compressed entries, with one key per token that all heads share."""

from dataclasses import replace

from ckdist.layout import Dim, Layout, Sharding
from ckdist.mesh import WHOLE
from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.compressed_fields import CompressedAttention
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer


def grouped_heads(sharding: Sharding, a: CompressedAttention) -> Dim:
    """The heads. Those of a group stay together."""
    return Dim("heads", a.num_heads, a.head_dim, sharding.axis("heads"), a.num_heads // a.groups)


def exchanged(g: Tracer, a: CompressedAttention, q: Value, *shared: Value) -> tuple[Value, ...]:
    """(own tokens, all heads) -> (all tokens, own heads) of queries; all tokens of values that heads share."""
    axis = g.sharding.tokens.axis
    if not axis:
        return q, *shared
    to_axis = WHOLE if q.dims[-1].axis else axis
    heads = grouped_heads(Sharding(Layout("heads", {"heads": to_axis}), g.mesh), a)
    names = [value.name.rpartition(".")[0] for value in (q, *shared)]
    to = heads, *(value.dims[-1] for value in shared)
    return g.emit("all_to_all", (q, *shared), names=names, axis=axis, to=to)


def compressed_attention(
    g: Tracer, x: Value, a: CompressedAttention, path: str, layer: int, eps: float, rows: Rows = all_rows
) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    hidden, heads, rank = x.dims[-1], grouped_heads(g.sharding, a), Dim("q_lora", a.q_rank)
    key, parts, compressor = Dim("key", 1, a.head_dim), 1 + a.overlap, "compressor"
    of_rows = {"q_a": w("q_a_proj.weight", rank, hidden), "kv": w("kv_proj.weight", key, hidden)}

    def windows(prefix: str, name: str, width: int) -> tuple[Weight, Weight]:
        """The bias and the norm of entries. Adds the matrices that make keys and gates of tokens."""
        row = Dim(f"{name}_row", parts, width)
        for part in ("kv", "gate"):
            of_rows[f"{name}_{part}"] = w(f"{prefix}.{part}_proj.weight", row, hidden)
        bias = w(f"{prefix}.position_bias", Dim("bias", a.ratio * parts * width))
        return bias, w(f"{prefix}.kv_norm.weight", Dim("norm", width))

    of_entries = windows(compressor, "entry", a.head_dim) if a.ratio else ()
    of_index: tuple[Weight, ...] = ()
    low = [w("q_b_proj.weight", heads, rank)]
    if i := a.indexer:
        of_index = windows(f"{compressor}.indexer", "index", i.head_dim)
        index_heads = Dim("index_heads", i.num_heads, i.head_dim)
        of_rows["index_w"] = w(
            f"{compressor}.indexer.scorer.weights_proj.weight", replace(index_heads, width=1), hidden
        )
        low.append(w(f"{compressor}.indexer.q_b_proj.weight", index_heads, rank))
    q_a, *made = g.linears(x, list(of_rows.values()), names=list(of_rows))
    normed = g.rms_norm(q_a, w("q_a_norm.weight", rank), eps)
    q, *index_q = g.linears(normed, low, names=["q", "index_q"][: len(low)])
    q, kv, *made = exchanged(g, a, q, *made, *index_q)
    listed: tuple[Value, ...] = ()
    attrs = {"layer": layer, "ratio": a.ratio, "overlap": a.overlap, "rope": a.rope, "eps": eps}
    if a.indexer:
        *made, index_kv, index_gate, index_w, of_queries = made
        operands = of_queries, index_w, index_kv, index_gate
        listed = g.stateful("select_entries", operands, of_index, ["entries"], index_top_k=a.indexer.top_k, **attrs)
    own = replace(q.dims[-1], width=1)
    norms = w("kv_norm.weight", Dim("norm", a.head_dim)), w("sinks", own)
    (o,) = g.stateful(
        "attend_compressed", (q, kv, *made, *listed), (*norms, *of_entries), ["o"],
        groups=a.groups, window=a.window, scale=a.head_dim**-0.5, **attrs,
    )  # fmt: skip
    group = o.dims[-1]
    o = g.linear_heads(o, w("o_a_proj.weight", replace(group, width=a.o_rank), Dim("group", group.width)))
    out = Dim("groups", a.groups, a.o_rank, heads.axis)  # columns of o_b_proj
    o = rows(g.to_tokens(o, out))
    return g.reduce(g.linear(o, w("o_b_proj.weight", hidden, out), names=["attn"]))
