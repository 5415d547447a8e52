"""Multi-head latent attention: the keys and values of all heads are made from one latent vector per token."""

from dataclasses import replace

from ckdist.layout import Dim
from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.spec import LatentAttention
from ckdist.program.program import Value
from ckdist.program.tracer import LatentWeights, Tracer


def latent_attention(
    g: Tracer, x: Value, a: LatentAttention, path: str, layer: int, eps: float, rows: Rows = all_rows
) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}.weight", *dims)
    hidden, rank = x.dims[-1], Dim("kv_lora", a.kv_lora_rank)
    heads, _ = g.sharding.heads(a.num_heads, 1, a.nope_dim + a.rope_dim)
    latent = Dim("latent", 1, a.key_width)
    kv_a = w("kv_a_proj_with_mqa", latent, hidden)
    of_index, index = None, ()
    gate = replace(heads, width=a.v_dim if a.element_gates else 1)
    gates, names = ([w("g_proj", gate, hidden)], ["gate"]) if a.gated else ([], [])
    if a.q_lora_rank:
        q_rank = Dim("q_lora", a.q_lora_rank)
        if a.indexer is not None:
            from ckdist.models.blocks.lightning_indexer import index_weights

            of_index = index_weights(g, a.indexer, f"{path}.indexer", hidden, q_rank)
        of_rows, of_low = (of_index.rows, (of_index.queries,)) if of_index else ((), ())
        names = ["q_a", *names, *("index_k", "index_w", "index_gate")[: len(of_rows)], "kv"]
        q_a, *made, kv = g.linears(x, [w("q_a_proj", q_rank, hidden), *gates, *of_rows, kv_a], names=names)
        normed = g.rms_norm(q_a, w("q_a_layernorm", q_rank), a.norm_eps or eps)
        of_normed = [w("q_b_proj", heads, q_rank), *of_low]
        q, *index_q = g.linears(normed, of_normed, names=["q", "index_q"][: len(of_normed)])
        index = (*index_q, *made[len(gates) :])
    else:
        q, *made, kv = g.linears(x, [w("q_proj", heads, hidden), *gates, kv_a], names=["q", *names, "kv"])
    q, kv, *index = g.to_heads_latent(q, kv, *index)
    if of_index is not None:
        g.positions = of_index.select(g, *index, layer=layer)
    own = q.dims[-1]  # if tokens were sharded before the exchange, heads are now
    k_b = w("k_b_proj", replace(own, width=a.kv_lora_rank), Dim("nope", a.nope_dim))
    key_norm = (w("k_rope_only_layernorm", Dim("rope", a.rope_dim)),) if a.key_norm else ()
    latent = LatentWeights(w("kv_a_layernorm", rank), k_b, w("v_b_proj", replace(own, width=a.v_dim), rank), key_norm)
    fields = {"rope": a.rope, "scale": a.scale, "query_scale": a.query_scale, "window": a.window}
    if a.sinks:
        fields["sinks"] = g.weight(f"{path}.sinks", replace(own, width=1))
    if a.indexer or a.shares_positions:
        fields |= {"positions": g.positions, "listed_window": a.indexer.pool if a.indexer else 0}
    o = g.attend_latent(q, kv, latent, layer=layer, eps=a.norm_eps or eps, **fields)
    out = replace(heads, width=a.v_dim)  # columns of o_proj
    o = g.to_tokens(o, out)
    for gate in made[: len(gates)]:
        o = g.gated(gate, o, "sigmoid")
    o = rows(o)
    return g.reduce(g.linear(o, w("o_proj", hidden, out), names=["attn"]))
