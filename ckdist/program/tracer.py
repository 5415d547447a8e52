"""Tracing: a forward is a Python function that is called with a `Tracer`; the recorded calls are the `Program`.

Each method appends one instruction, or none if the layout does not need it, and returns the values. There is no global
state: a tracer records only the calls on itself.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ckdist.layout import Dim, Layout, Sharding, head_dims
from ckdist.mesh import WHOLE, Mesh
from ckdist.program.emitter import Emitter
from ckdist.program.program import Program, Value, Weight
from ckdist.program.query_scale import QueryScale
from ckdist.program.routing import Routing

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class LowRank:
    """LoRA on a model's linears."""

    rank: Callable[[str], int]  # name of a linear, without ".weight" -> its rank; 0 if it has no LoRA
    scale: float
    dropout: float = 0.0  # share of the elements of a linear's input that A does not read; in training only
    has_magnitudes: bool = False  # DoRA; in training only
    slots: int = 0  # adapters that a step may have, each sequence its own; 0: one adapter for all. Experts have one

    def pair(self, w: Weight) -> tuple[Weight, Weight] | None:
        """A and B of a matrix or a stack; None if it has no LoRA."""
        stem = w.name.removesuffix(".weight")
        if not (size := self.rank(stem)):
            return None
        (*stack, rows, columns), rank = w.dims, Dim("rank", size)
        a, b = (*stack, rank, columns), (*stack, rows, rank)
        return Weight(f"{stem}.lora_A.weight", a), Weight(f"{stem}.lora_B.weight", b)


@dataclass(frozen=True)
class LatentWeights:
    """The weights of latent attention after its projections."""

    norm: Weight  # (rank,): the norm of the latent vector
    keys: Weight  # per head (rank, nope)
    values: Weight  # per head (values, rank)
    key_norm: tuple[Weight, ...] = ()  # (rope,): the norm of the key before its rotation


class Tracer(Emitter):
    """The argument `g` of a forward. `g.sharding` makes the named dimensions under the layout."""

    def __init__(self, layout: Layout, mesh: Mesh, low_rank: LowRank | None = None):
        super().__init__()
        self.low_rank = low_rank
        self.mesh, self.sharding = mesh, Sharding(layout, mesh)
        self.boundaries: list[Value] = []
        self.carried: dict[Value, None] = {}
        self.dropout_keys: tuple[Value, ...] = ()  # of LoRA's dropout: one number for each token
        self.positions: Value | None = None  # of the last layer with an indexer

    def _emit(self, op: str, *operands: Any, **attrs: Any) -> Value:
        """`emit` for an op with one output."""
        (output,) = self.emit(op, *operands, **attrs)
        return output

    def weight(self, name: str, *dims: Dim) -> Weight:
        """Returns the weight `name` with dimensions `dims`."""
        return Weight(name, dims)

    def embed(self, ids: Value, table: Weight, eps: float = 0.0) -> Value:
        """(tokens,) ids -> (tokens, hidden). Partial if the vocabulary is sharded. With `eps` rows are normed.

        If tokens are sharded, a rank reads the other ranks' shards of the table.
        """
        if axis := ids.dims[0].axis:
            rows, columns = table.dims
            table = Weight(table.name, (replace(rows, axis=self.mesh.without(rows.axis, axis)), columns))
        return self._emit("embed", (ids,), (table,), **_given(eps=eps))

    def linear(
        self, x: Value, weight: Weight, bias: Sequence[Weight] = (), names: Sequence[str] | None = None
    ) -> Value:
        """`linears` with one weight."""
        return self.linears(x, (weight,), bias, names)[0]

    def linears(
        self, x: Value, weights: Sequence[Weight], bias: Sequence[Weight] = (), names: Sequence[str] | None = None
    ) -> tuple[Value, ...]:
        """Returns x @ w.T (+ bias) for each weight. Partial if the input dimension is sharded."""
        outputs = self.emit("linear", (x,), (*weights, *(bias or [None] * len(weights))), names)
        return outputs if self.low_rank is None else self._adapted(x, weights, outputs, self.low_rank)

    def _adapted(
        self, x: Value, weights: Sequence[Weight], outputs: tuple[Value, ...], low_rank: LowRank
    ) -> tuple[Value, ...]:
        """Adds scale * B (A x) to the outputs whose weights have A and B."""
        pairs = {i: pair for i, w in enumerate(weights) if (pair := low_rank.pair(w))}
        if not pairs:
            return outputs
        names = [f"{weights[i].name.split('.')[-2]}_lora" for i in pairs]
        operands = (x, *(outputs[i] for i in pairs), *self.dropout_keys)
        matrices = [w for pair in pairs.values() for w in pair]
        attrs = _given(slots=low_rank.slots)
        attrs |= {"dropout": low_rank.dropout} if self.dropout_keys else {}
        results = self.emit("low_rank", operands, matrices, names, scale=low_rank.scale, **attrs)
        found = dict(zip(pairs, results, strict=True))
        return tuple(found.get(i, value) for i, value in enumerate(outputs))

    def rms_norm(self, x: Value, w: Weight | None, eps: float) -> Value:
        """rms_norm over the last dimension, or per head if `w` has the size of one head. None: without weights."""
        return self._emit("rms_norm", (x,), (w,), names=["norm"], eps=eps)

    def layer_norm(self, x: Value, w: Weight, bias: Weight | None, eps: float) -> Value:
        """layer_norm over the last dimension."""
        return self._emit("layer_norm", (x,), (w, bias), names=["norm"], eps=eps)

    def embed_positions(self, ids: Value, table: Weight | None, types: Weight | None, first: int) -> Value:
        """(tokens,) ids -> (tokens, hidden): table[position + first] + types[t].

        t is 1 for tokens of a second text, else 0. One of the two tables may be None.
        """
        return self._emit("embed_positions", (ids,), (table, types), names=["positions"], first=first)

    def embed_waves(self, ids: Value, table: str, hidden: Dim) -> Value:
        """(tokens,) ids -> (tokens, hidden): [sin(angles), cos(angles)] with the angles of the rotation `table`."""
        return self._emit("embed_waves", (ids,), names=["positions"], table=table, hidden=hidden)

    def rms_norm_heads(self, q: Value, k: Value, q_weight: Weight, k_weight: Weight, eps: float) -> tuple[Value, Value]:
        """Norms queries and keys over all heads of a token. An all_reduce sums the squares over ranks."""
        squares = self.reduce(self._emit("sum_squares", (q, k), names=["squares"]))
        q, k = self.emit("rms_norm_heads", (q, k, squares), (q_weight, k_weight), ["norm", "norm"], eps=eps)
        return q, k

    @property
    def exchange_axis(self) -> str | None:
        """The axis over which tokens are exchanged for heads; None if tokens are not sharded."""
        return self.sharding.tokens.axis

    def to_heads(self, values: Sequence[Value], heads: Callable[[Sharding], tuple[Dim, Dim]]) -> tuple[Value, ...]:
        """Exchanges (own tokens, all heads) for (all tokens, own heads), the layout of the cache.

        Emits nothing if tokens are not sharded. `heads` makes the dimensions `heads` and `kv_heads` under a sharding;
        the last dimension of each value is one of these, or whole.
        """
        axis = self.exchange_axis
        if not axis:
            return tuple(values)
        to_axis = WHOLE if any(x.dims[-1].axis for x in values) else axis
        own = {dim.name: dim for dim in heads(Sharding(Layout("heads", {"heads": to_axis}), self.mesh))}
        to = tuple(replace(own.get(x.dims[-1].name, x.dims[-1]), width=x.dims[-1].width) for x in values)
        names = [x.name.rpartition(".")[0] for x in values]
        return self.emit("all_to_all", values, names=names, axis=axis, to=to)

    def to_tokens(self, o: Value, heads: Dim) -> Value:
        """The inverse of `to_heads`: (all tokens, own heads) -> (own tokens, `heads`)."""
        axis = self.exchange_axis
        return self._emit("all_to_all", (o,), names=["o"], axis=axis, to=(heads,)) if axis else o

    def to_heads_latent(self, q: Value, *shared: Value) -> tuple[Value, ...]:
        """`to_heads` for latent attention: queries, and values that all heads share: latent vectors, and an index."""
        axis = self.exchange_axis
        if not axis:
            return q, *shared
        heads, *whole = (x.dims[-1] for x in (q, *shared))
        heads, _ = head_dims(heads.count, 1, heads.width, WHOLE if heads.axis else axis, self.mesh)
        names = [x.name.rpartition(".")[0] for x in (q, *shared)]
        return self.emit("all_to_all", (q, *shared), names=names, axis=axis, to=(heads, *whole))

    def linear_heads(self, x: Value, weight: Weight) -> Value:
        """Per head: [w_head @ x[:columns], x[columns:]]."""
        return self._emit("linear_heads", (x,), (weight,), names=["heads"])

    def norm_latent(self, x: Value, w: Weight, eps: float, *rest: Weight) -> Value:
        """rms_norm of the first n elements, for a weight `w` of n elements; of the others with the weight `rest`."""
        return self._emit("norm_latent", (x,), (w, *rest), names=["latent"], eps=eps)

    def rope(self, x: Value, table: str, first: int = 0) -> Value:
        """Rotates the dimensions of each head from `first` on; `table` is "global" or "local"."""
        return self._emit("rope", (x,), table=table, **_given(first=first))

    def scale_queries(self, q: Value, rule: QueryScale | None) -> Value:
        """Scales queries by their position. None: unchanged."""
        return q if rule is None else self._emit("scale_queries", (q,), **vars(rule))

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        sinks: Weight | None = None,
        *,
        layer: int,
        scale: float,
        soft_cap: float,
        window: int,
        bidirectional: bool = False,
        relative: tuple[Weight, int, int] | None = None,
        positions: Value | None = None,
        listed_block: int = 0,
        listed_window: int = 0,
        shared: bool = False,
    ) -> Value:
        """Causal attention over the cache of `layer`, which k and v extend.

        - `sinks`: (heads,) scores without values.
        - `bidirectional`: not causal. All tokens of a sequence must be in the step.
        - `relative`: (weights of biases by distance, number of buckets, largest distance).
        - `positions`: of `select_positions`; a token sees only these. `listed_block`: those of `select_blocks`.
          `listed_window`: they are those of chosen windows.
        - `shared`: the cache has k and v already, which an earlier `attend` of this `layer` has stored.
        """
        attrs: dict[str, Any] = {"layer": layer, "scale": scale, "soft_cap": soft_cap, "window": window}
        listing = {"listed_block": listed_block, "listed_window": listed_window}
        attrs |= _given(shared=shared, **listing, bidirectional=bidirectional)
        weights: tuple[Weight | None, ...] = () if sinks is None else (sinks,)
        if relative is not None:
            weights = (sinks, relative[0])
            attrs |= {"buckets": relative[1], "distance": relative[2]}
        listed = () if positions is None else (positions,)
        return self._emit("attend", (q, k, v, *listed), weights, ["o"], **attrs)

    def store_cross(self, k: Value, v: Value, queries: Dim, *, layer: int) -> None:
        """Stores keys and values of the encoder's output in the cache `layer`, for `attend_cross` with `queries`."""
        self.emit("store_cross", (k, v), names=[], queries=queries, layer=layer)

    def attend_cross(self, q: Value, keys: Dim, values: Dim, *, layer: int, scale: float) -> Value:
        """Attention over all positions that `store_cross` has stored in the cache `layer`.

        `keys` and `values` are the dimensions of the stored arrays.
        """
        return self._emit("attend_cross", (q,), names=["o"], layer=layer, scale=scale, keys=keys, values=values)

    def stateful(
        self, op: str, inputs: Sequence[Value], weights: Sequence[Weight | None], names: Sequence[str], **attrs: Any
    ) -> tuple[Value, ...]:
        """`emit` for ops that keep a state of each sequence, or belong to one that does. They are not trained."""
        return self.emit(op, inputs, weights, names, **attrs)

    def short_conv(
        self, q: Value, k: Value, v: Value, kernels: Sequence[Weight], *, layer: int
    ) -> tuple[Value, Value, Value]:
        """SiLU of a causal depthwise convolution over the tokens of the sequence."""
        q, k, v = self.stateful("short_conv", (q, k, v), kernels, ["q", "k", "v"], layer=layer)
        return q, k, v

    def l2_norm(self, x: Value, eps: float, scale: float = 1.0) -> Value:
        """Per head: x / sqrt(sum(x^2) + eps) * scale."""
        return self._emit("l2_norm", (x,), names=["norm"], eps=eps, scale=scale)

    def delta_gates(self, a: Value, b: Value, a_log: Weight, dt_bias: Weight, **more: float) -> tuple[Value, Value]:
        """Per head: the decays of the state, one for all rows or one each, and the weight beta of the new value."""
        decay, beta = self.emit("delta_gates", (a, b), (a_log, dt_bias), ["decay", "beta"], **more)
        return decay, beta

    def delta_rule(self, q: Value, k: Value, v: Value, decay: Value, beta: Value, *, layer: int, tiled: bool) -> Value:
        """The gated delta rule: keys and values update the states of `layer` token by token, queries read them."""
        return self._emit("delta_rule", (q, k, v, decay, beta), names=["o"], layer=layer, tiled=tiled)

    def gated_norm(self, x: Value, gate: Value, w: Weight, eps: float, function: str = "silu") -> Value:
        """Per head: rms_norm(x) * function(gate)."""
        return self._emit("gated_norm", (x, gate), (w,), names=["o"], eps=eps, function=function)

    def select_positions(self, q: Value, k: Value, weights: Value, *, layer: int, index_top_k: int) -> Value:
        """The `index_top_k` positions of each token with the largest scores, for `attend` and `attend_latent`.

        score = sum over index heads of weight * max(q . k, 0). The keys k extend the index of `layer`. A token with
        fewer positions sees all. The operands have all tokens; k may be normed and rotated, q rotated.

        Args:
            q: (tokens, index_heads * width).
            k: (tokens, width).
            weights: (tokens, index_heads).
        """
        operands = (q, k, weights)
        return self._emit("select_positions", operands, names=["positions"], layer=layer, index_top_k=index_top_k)

    def attend_latent(
        self,
        q: Value,
        kv: Value,
        w: LatentWeights,
        *,
        layer: int,
        rope: str | None,
        scale: float,
        eps: float,
        positions: Value | None = None,
        listed_window: int = 0,
        window: int = 0,
        sinks: Weight | None = None,
        query_scale: QueryScale | None = None,
    ) -> Value:
        """Causal latent attention in the absorbed form, over the cache of `layer`, which `kv` extends.

        `positions`: of `select_positions`; a token sees only these. `listed_window`: they are those of chosen windows.
        `window`: as in `Attention`.

        A head of q is [nope, rope]: first the part that is not rotated. `kv` is [latent vector, key to rotate].
        """
        rank = w.keys.dims[0].width
        q, k = self.linear_heads(q, w.keys), self.norm_latent(kv, w.norm, eps, *w.key_norm)
        if rope is not None:
            q, k = (self.rope(value, rope, first=rank) for value in (q, k))
        q = self.scale_queries(q, query_scale)
        listed = () if positions is None else (positions,)
        own = () if sinks is None else (sinks,)
        more = _given(listed_window=listed_window, window=window)
        o = self._emit("attend_latent", (q, k, *listed), own, ["o"], layer=layer, scale=scale, value_width=rank, **more)
        return self.linear_heads(o, w.values)

    def gated(self, gate: Value, up: Value, function: str, scale: float = 1.0, limit: float = 0.0) -> Value:
        """function(scale * gate) * up. `limit`: of both factors; 0: none. A gate may be for a whole head."""
        more: dict[str, Any] = {"gate_scale": scale} if scale != 1.0 else {"limit": limit} if limit else {}
        op = "gated" if gate.dims[-1].width == up.dims[-1].width else "gated_heads"
        return self._emit(op, (gate, up), names=["act"], function=function, **more)

    def activate(self, x: Value, function: str) -> Value:
        """function(x)."""
        return self._emit("activate", (x,), names=["act"], function=function)

    def input_rows(self, ids: Value, hidden: Dim) -> Value:
        """(tokens,) ids -> (tokens, hidden): the rows that the batch brings, one for each token."""
        return self._emit("input_rows", (ids,), names=["rows"], hidden=hidden)

    def output_rows(self, x: Value) -> Value:
        """Marks these rows as the output of the program."""
        return self._emit("output_rows", (x,), names=["rows"])

    def mean_rows(self, x: Value) -> Value:
        """Replaces each row by the mean of the rows of its sequence."""
        return self._emit("mean_rows", (x,), names=["mean"])

    def route(
        self,
        logits: Sequence[Value],
        correction: Weight | None,
        routing: Routing,
        shared: bool,
        factors: Weight | None = None,
        table: tuple[Value, Weight] | None = None,
    ) -> tuple[Value, Value]:
        """The experts of each token and their shares.

        If `shared`, the last share is that of the expert that all tokens use: sigmoid(logits[1]), or 1 without it.
        `factors`: (experts,) factors of the other shares. `table`: token ids, and the experts of each id as bits.
        """
        weights: tuple[Weight | None, ...] = (correction,) if factors is None else (correction, factors)
        attrs = dataclasses.asdict(routing)
        if table is not None:
            logits, weights, attrs["hashed"] = (*logits, table[0]), (correction, factors, table[1]), True
        chosen, shares = self.emit("route", logits, weights, ["chosen", "shares"], shared=shared, **attrs)
        return chosen, shares

    def experts(
        self,
        x: Value,
        chosen: Value,
        shares: Value,
        weights: Sequence[Weight],
        function: str,
        biases: Sequence[Weight] = (),
        **more: Any,
    ) -> Value:
        """The sum of share * output over a token's experts. Partial if experts or their sizes are sharded.

        `weights` are the stacks gate, up and down, then those of the shared expert, if there is one. `biases` is empty
        or has those of the routed experts' gate, up and down.
        `shares_input`: shares multiply the routed experts' inputs in place of their outputs.
        `limits`: of the gates of routed experts and of the shared expert; 0: none.
        `shared_function`: of the shared expert, if it is another one.
        """
        operands, matrices, attrs = (x, chosen, shares), *self._of_experts(weights, biases)
        return self._emit("experts", operands, matrices, names=["moe"], function=function, **attrs, **more)

    def _of_experts(self, weights: Sequence[Weight], biases: Sequence[Weight]) -> tuple[list[Weight], dict[str, Any]]:
        """All weights of an experts instruction, with A and B of LoRA, and the attributes that describe them."""
        attrs = _given(biased=bool(biases))
        pairs = {i: pair for i, w in enumerate(weights) if self.low_rank and (pair := self.low_rank.pair(w))}
        if pairs and self.low_rank:
            attrs |= {"adapted": tuple(pairs), "scale": self.low_rank.scale}
        return [*weights, *biases, *(w for pair in pairs.values() for w in pair)], attrs

    def add(self, x: Value, y: Value) -> Value:
        """The sum of two values of the same dimensions."""
        return self._emit("add", (x, y), names=["x"])

    def scale(self, x: Value, factor: float) -> Value:
        """Returns x * factor. Emits nothing if the factor is 1."""
        return x if factor == 1.0 else self._emit("scale", (x,), factor=factor)

    def join(self, x: Value, y: Value, factor: float) -> Value:
        """Returns x + factor * y, of parts of a layer that read the same input."""
        return self._emit("join", (x, y), names=["x"], factor=factor)

    def soft_cap(self, x: Value, cap: float) -> Value:
        """Returns cap * tanh(x / cap). Emits nothing if the cap is 0."""
        return x if cap == 0.0 else self._emit("soft_cap", (x,), cap=cap)

    def select_rows(self, x: Value) -> Value:
        """The rows whose logits are needed: (tokens, n) -> (outputs, n)."""
        return self._emit("select_rows", (x,), dim=self.sharding.outputs)

    def reduce(self, x: Value) -> Value:
        """Emits an all_reduce over each axis that x is partial over, or nothing."""
        return self.whole(x, "sum")

    def gather(self, x: Value) -> Value:
        """Emits an all_gather if a dimension is sharded."""
        axis = next((d.axis for d in x.dims if d.axis), None)
        return self._emit("all_gather", (x,), names=["all"], axis=axis) if axis else x

    def boundary(self, x: Value, *more: Value) -> Value:
        """Marks `x` as the end of a block: the following ones read x and `more` values, made before. Returns x."""
        self.boundaries.append(x)
        self.carried |= dict.fromkeys(more)
        return x


def _given(**attrs: Any) -> dict[str, Any]:
    """The attributes that are not 0 or False. The others are left out of a program's text."""
    return {name: value for name, value in attrs.items() if value}


def trace(
    forward: Callable[[Tracer, Value, Spec], Value],
    spec: Spec,
    layout: Layout,
    mesh: Mesh,
    tracer: Callable[[Layout, Mesh], Tracer] = Tracer,
) -> Program:
    """Traces `forward(g, ids, spec)` under a layout.

    Raises:
        LayoutError: The forward lacks a collective that this layout needs.
    """
    g = tracer(layout, mesh)
    ids = Value("ids", (g.sharding.tokens,), "i32")
    return Program((ids,), (forward(g, ids, spec),), tuple(g.instrs), tuple(g.boundaries), tuple(g.carried))
