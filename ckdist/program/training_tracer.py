"""The forward of a model, traced as part of a loss."""

from collections.abc import Callable, Sequence
from typing import Any

from ckdist.errors import ConfigError
from ckdist.layout import Dim, Layout, Sharding
from ckdist.mesh import Mesh
from ckdist.program.program import Program, Value, Weight
from ckdist.program.routing import Routing
from ckdist.program.tracer import LatentWeights, LowRank, Spec, Tracer

NOT_TRAINED = "models with linear attention or gated attention can be served, not trained: choose another model"
WITH_GRADIENT = ("silu", "gelu_tanh", "clamped_swiglu")


def check_gradient(function: str) -> None:
    """ConfigError for a gate's function whose gradient the kernels do not have."""
    if function not in WITH_GRADIENT:
        known = ", ".join(WITH_GRADIENT)
        raise ConfigError(f"models with the gate function {function} can be served, not trained; {known} can")


class TrainingTracer(Tracer):
    """`g` in a loss: sequences are packed and there is no cache.

    Where tokens are sharded, they are so between sequences.
    """

    def __init__(self, layout: Layout, mesh: Mesh, low_rank: LowRank | None = None):
        super().__init__(layout, mesh, low_rank)
        self._switches: dict[Value, Value] = {}  # shares -> logits of the switch of the experts that all tokens take
        self._routed: list[Value] = []  # logits and chosen experts of the layers so far, by turns

    def rms_norm_heads(self, q: Value, k: Value, q_weight: Weight, k_weight: Weight, eps: float) -> tuple[Value, Value]:
        """As two norms, each over a whole row: a rank has all heads of its tokens."""
        return self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)

    def to_heads(self, values: Sequence[Value], heads: Callable[[Sharding], tuple[Dim, Dim]]) -> tuple[Value, ...]:
        """Nothing: a rank has all heads of its tokens."""
        del heads  # there is nothing to exchange
        return tuple(values)

    def to_tokens(self, o: Value, heads: Dim) -> Value:  # noqa: ARG002
        """Nothing, as `to_heads`."""
        return o

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
    ) -> Value:
        """Causal attention within each of the batch's sequences. ConfigError for another one."""
        del layer  # there is no cache to choose
        if relative is not None:
            raise ConfigError(NOT_TRAINED)
        if bidirectional:
            raise ConfigError("encoders can be served, not trained: choose another model")
        weights, attrs = () if sinks is None else (sinks,), {"scale": scale, "soft_cap": soft_cap, "window": window}
        return self.emit("attend_packed", (q, k, v), weights, ["o", "lse"], **attrs)[0]

    def gated(self, gate: Value, up: Value, function: str) -> Value:
        """function(gate) * up. ConfigError for gates behind attention, and for functions without a gradient."""
        if function == "sigmoid":
            raise ConfigError(NOT_TRAINED)
        check_gradient(function)
        return super().gated(gate, up, function)

    def short_conv(self, *_: Any, **__: Any) -> tuple[Value, Value, Value]:
        """ConfigError: there are no gradients of linear attention."""
        raise ConfigError(NOT_TRAINED)

    def route(
        self, logits: Sequence[Value], correction: Weight | None, routing: Routing, shared: bool
    ) -> tuple[Value, Value]:
        """The experts that each token takes, and with what share each."""
        del shared  # the experts that all tokens take are computed by themselves
        router, *switch = logits
        chosen, shares = super().route([router], correction, routing, False)
        self._switches.update((shares, x) for x in switch)
        self._routed += [router, chosen]
        return chosen, shares

    def experts(
        self,
        x: Value,
        chosen: Value,
        shares: Value,
        weights: Sequence[Weight],
        function: str,
        biases: Sequence[Weight] = (),
    ) -> Value:
        """As of every tracer; the experts that all tokens take are linears, and those that are chosen keep what their
        gradients read.
        """
        check_gradient(function)
        own, shared = weights[:3], weights[3:]
        operands, matrices, attrs = (x, chosen, shares), *self._of_experts(own, biases)
        names = ["moe", "gate", "up", *(["low"] * len(attrs.get("adapted", ())))]
        chosen_sum = self.emit("grouped_experts", operands, matrices, names, function=function, **attrs)[0]
        if not shared:
            return chosen_sum
        a, b = self.linear(x, *shared[:2], names=["gate", "up"])
        y = self.linear(self.gated(a, b, function), shared[2], names=["shared"])
        if shares in self._switches:
            y = self._emit("switched", (y, self._switches[shares]))
        return self.add(chosen_sum, y)

    def to_heads_latent(self, q: Value, kv: Value) -> tuple[Value, Value]:
        """Nothing, as `to_heads`."""
        return q, kv

    def attend_latent(
        self, q: Value, kv: Value, w: LatentWeights, *, layer: int, rope: str | None, scale: float, eps: float
    ) -> Value:
        """Causal attention within each of the batch's sequences, in the expanded form: keys and values of every head
        are made of the latent vectors.
        """
        (rank, nope), k = (w.keys.dims[0].width, w.keys.dims[1].elements), self.norm_latent(kv, w.norm, eps)
        if rope is not None:
            q, k = self.rope(q, rope, first=nope), self.rope(k, rope, first=rank)
        keys = self._emit("latent_keys", (k,), (w.keys,), names=["keys"])
        latent = self._emit("latent_values", (k,), names=["latent"], dim=w.values.dims[1])
        values = self.linear(latent, w.values, names=["values"])
        return self.attend(q, keys, values, layer=layer, scale=scale, soft_cap=0.0, window=0)

    def cross_entropy(self, x: Value, targets: Value, head: Weight, soft_cap: float) -> Value:
        """The sum of the losses of soft_cap(x @ head.T) over the tokens with a target.

        Partial where tokens are sharded.
        """
        return self.emit("cross_entropy", (x, targets), (head,), ["loss", "lse"], soft_cap=soft_cap)[0]

    def balance_loss(self, targets: Value, coefficient: float) -> Value:
        """What the choices of all layers so far add to the sum of the losses. Partial where tokens are sharded."""
        tally, layers = self._emit("tally", (targets, *self._routed)), len(self._routed) // 2
        operands = (targets, tally)
        return self._emit("balance_loss", operands, names=["balance"], layers=layers, coefficient=coefficient)


def trace_loss(
    loss: Callable[[TrainingTracer, Value, Value, Spec], Value],
    spec: Spec,
    layout: Layout,
    mesh: Mesh,
    tracer: Callable[[Layout, Mesh], TrainingTracer] = TrainingTracer,
) -> Program:
    """The program of `loss(g, ids, targets, spec)`: the sum of the losses over all ranks' tokens.

    What `backward` starts from.
    """
    g = tracer(layout, mesh)
    ids, targets = (Value(name, (g.sharding.tokens,), "i32") for name in ("ids", "targets"))
    return Program((ids, targets), (loss(g, ids, targets, spec),), tuple(g.instrs), tuple(g.boundaries))


__all__ = ["TrainingTracer", "trace_loss"]
