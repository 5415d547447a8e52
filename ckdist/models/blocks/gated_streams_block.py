"""The layers of a model whose residual streams are read by gates of low rank, and its embeddings of n-grams."""

from collections.abc import Sequence

from ckdist.layout import Dim
from ckdist.models.blocks.attention import all_rows
from ckdist.models.decoder import NGRAMS, feed_forward, mix
from ckdist.models.gated_fields import GatedStreams, Ngrams
from ckdist.models.spec import ModelSpec
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def run_gated_streams(g: Tracer, ids: Value, x: Value, spec: ModelSpec, c: GatedStreams) -> Value:
    """(tokens, hidden) embeddings -> (tokens, hidden) after the last layer, normed."""
    y, eps = x, spec.norm_eps
    before: Sequence[Value] = ()
    for i, layer in enumerate(spec.layers):
        path = f"{spec.root}.layers.{i}"
        assert layer.mixer is not None and layer.ffn is not None
        if c.ngrams and c.ngrams.layer == i:
            (streams,) = g.stateful("add_streams", (y, *before), (), ["streams"], streams=c.count, eps=eps)
            y, *before = with_ngrams(g, ids, streams, spec, c, c.ngrams)
        x, *before = read(g, y, before, spec, c, f"{path}.attn_hyper_connection")
        y = mix(g, x, layer.mixer, path, i, eps, all_rows, None)
        x, *before = read(g, y, before, spec, c, f"{path}.mlp_hyper_connection")
        y = g.boundary(feed_forward(g, x, x, layer.ffn, path, eps), *before)
    x, *_ = read(g, y, before, spec, c, f"{spec.root}.hyper_connection_mixer", last=True)
    return x


def read(
    g: Tracer, y: Value, before: Sequence[Value], spec: ModelSpec, c: GatedStreams, path: str, last: bool = False
) -> tuple[Value, ...]:
    """Adds y to the streams. Returns the input of the next part, the streams, and the coefficients of its result."""
    hidden, wide = Dim("hidden", spec.hidden_size), Dim("streams", c.count, spec.hidden_size)
    w = lambda name, *dims: g.weight(f"{path}.{name}.weight", *dims)
    norm, rank = w("hc_norm", Dim("streams_norm", wide.elements)), Dim("gate_rank", c.rank)
    streams, normed = g.stateful(
        "add_streams", (y, *before), (norm,), ["streams", "normed"], streams=c.count, eps=spec.norm_eps
    )
    inject = () if last else (w("block_inject_weight", Dim("coefs", c.count), wide),)
    coefs = g.linears(normed, inject, names=["coefs"]) if inject else ()
    low = g.activate(g.linear(normed, w("input_mix_weight_down", rank, wide), names=["low"]), "silu")
    gates = g.linear(low, w("input_mix_weight_up", wide, rank), names=["gates"])
    (x,) = g.stateful("read_streams", (normed, gates), (), ["x"], streams=c.count, hidden=hidden)
    return x, streams, *coefs


def with_ngrams(
    g: Tracer, ids: Value, streams: Value, spec: ModelSpec, c: GatedStreams, n: Ngrams
) -> tuple[Value, Value]:
    """A row for each stream that is to be added, and the streams with the gated embeddings of n-grams."""
    path, layer, hidden, wide = (
        f"{spec.root}.layers.{n.layer}.ple",
        len(spec.layers) + n.layer,  # of the caches
        Dim("hidden", spec.hidden_size),
        streams.dims[-1],
    )
    hashes = {name: getattr(n, name) for name in ("multipliers", "sizes", "offsets", "each", "end")}
    (rows,) = g.stateful("ngram_rows", (ids,), (g.weight(NGRAMS, *n.table),), ["ngrams"], layer=layer, **hashes)
    columns = rows.dims[-1]
    w = lambda name, *dims: g.weight(f"{path}.{name}.weight", *dims)
    of_rows = w("key_proj", wide, columns), w("value_proj", hidden, columns)
    key, value = g.linears(rows, of_rows, names=["key", "value"])
    norms = [w(f"norm_{name}", Dim("streams_norm", wide.elements)) for name in ("key", "query", "conv")]
    operands, sizes = (streams, key, value), {"streams": c.count, "eps": spec.norm_eps}
    streams, gated = g.stateful("gate_streams", operands, norms, ["streams", "gated"], **sizes)
    if axis := g.sharding.tokens.axis:
        (gated,) = g.emit("all_to_all", (gated,), names=["gated"], axis=axis, to=(wide,))
    kernel = w("conv1d", Dim("streams_taps", wide.elements * n.taps))
    (y,) = g.stateful(
        "convolve_streams", (gated,), (kernel,), ["ngrams"],
        layer=layer, taps=n.taps, dilation=n.dilation, tokens=g.sharding.tokens,
    )  # fmt: skip
    return y, streams
