"""The forward of a model, traced as part of a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckdist.errors import ConfigError
from ckdist.layout import Dim, Layout
from ckdist.mesh import Mesh
from ckdist.program.program import Program, Value, Weight
from ckdist.program.query_scale import QueryScale
from ckdist.program.routing import Routing
from ckdist.program.tracer import LatentWeights, LowRank, Spec, Tracer

PRODUCTS = 4  # of a step, as in native/runtime/steps/products.h
NOT_TRAINED = "models with Mamba-1, compressed attention or streams can be served, not trained: choose another model"
WITH_GRADIENT = ("silu", "gelu_tanh", "clamped_swiglu", "sigmoid", "softplus", "identity", "relu")


def check_gradient(function: str) -> None:
    """Raises ConfigError if the kernels have no gradient of a gate function."""
    if function not in WITH_GRADIENT:
        known = ", ".join(WITH_GRADIENT)
        raise ConfigError(f"models with the gate function {function} can be served, not trained; {known} can")


@dataclass(frozen=True)
class TeacherLoss:
    """A loss that follows a teacher: (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher, student).

    Both distributions of the divergence are softmax(logits / temperature): Hinton et al. 2015, arXiv:1503.02531.
    """

    choices: int  # most probable tokens of the teacher that are known
    temperature: float
    weight: float


class TrainingTracer(Tracer):
    """The argument `g` of a loss. Sequences are packed and there is no cache.

    If tokens are sharded, they are divided between sequences. With a `teacher`, the program has two more inputs: its
    choices' ids and log-probabilities, (tokens, choices). With `labels`, targets are labels, and a head with a row for
    each of them replaces the output projection.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        low_rank: LowRank | None = None,
        teacher: TeacherLoss | None = None,
        labels: int = 0,
    ):
        super().__init__(layout, mesh, low_rank)
        self.labels = labels
        self.teacher, self.teacher_inputs = teacher, ()
        if teacher is not None:
            dims = (self.sharding.tokens, Dim("choices", teacher.choices))
            self.teacher_inputs = Value("teacher_ids", dims, "i32"), Value("teacher_logprobs", dims)
        if low_rank is not None and low_rank.dropout:
            self.dropout_keys = (Value("dropout_keys", (self.sharding.tokens,), "i32"),)
        self._norms: dict[Value, tuple[float, float]] = {}  # queries or keys -> (eps, scale)
        self._gates: dict[Value, tuple[tuple[Weight, Weight], dict[str, float]]] = {}  # decays -> weights, numbers
        self._switches: dict[Value, Value] = {}  # shares -> logits of the shared expert's switch
        self._routed: list[Value] = []  # logits, chosen experts, logits, ... of the layers so far

    def linears(
        self, x: Value, weights: Sequence[Weight], bias: Sequence[Weight] = (), names: Sequence[str] | None = None
    ) -> tuple[Value, ...]:
        """`Tracer.linears`. With magnitudes (DoRA), an adapted result is scaled before its bias is added."""
        if len(weights) > PRODUCTS:
            parts = [slice(at, at + PRODUCTS) for at in range(0, len(weights), PRODUCTS)]
            made = (self.linears(x, weights[p], bias[p] if bias else (), names[p] if names else None) for p in parts)
            return tuple(value for part in made for value in part)
        low = self.low_rank
        if low is None or not low.has_magnitudes:
            return super().linears(x, weights, bias, names)
        pairs, biases = [low.pair(w) for w in weights], list(bias) or [None] * len(weights)
        plain = [None if pair else b for pair, b in zip(pairs, biases, strict=True)]
        outputs = list(self._adapted(x, weights, self.emit("linear", (x,), (*weights, *plain), names), low))
        for at, (w, pair, b) in enumerate(zip(weights, pairs, biases, strict=True)):
            if pair:
                magnitude = Weight(f"{w.name.removesuffix('.weight')}.lora_magnitude_vector", w.dims[:1])
                norms = self._emit("row_norms", (), (w, *pair), names=["norms"], scale=low.scale)
                outputs[at] = self._emit("magnitude", (self.whole(outputs[at]), norms), (magnitude, b))
        return tuple(outputs)

    def rms_norm_heads(self, q: Value, k: Value, q_weight: Weight, k_weight: Weight, eps: float) -> tuple[Value, Value]:
        """Emits two norms, each over a whole row: a rank has all heads of its tokens."""
        return self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)

    @property
    def exchange_axis(self) -> str | None:
        """None: a rank has all heads of its tokens."""
        return None

    def attend(self, q: Value, k: Value, v: Value, sinks: Weight | None = None, **attrs: Any) -> Value:
        """Causal attention within each sequence of the batch. Raises ConfigError for any other attention.

        `attrs`: as of `Tracer.attend`. Those of its cache and of `select_positions` have no effect.
        """
        if attrs.get("relative") is not None:
            raise ConfigError(NOT_TRAINED)
        if attrs.get("bidirectional"):
            raise ConfigError("encoders can be served, not trained: choose another model")
        weights, scores = () if sinks is None else (sinks,), {n: attrs[n] for n in ("scale", "soft_cap", "window")}
        return self.emit("attend_packed", (q, k, v), weights, ["o", "lse"], **scores)[0]

    def embed(self, ids: Value, table: Weight, eps: float = 0.0) -> Value:
        """(tokens,) ids -> (tokens, hidden). Raises ConfigError for rows that are normed."""
        if eps:
            raise ConfigError("models with normed embeddings can be served, not trained: choose another model")
        return super().embed(ids, table)

    def gated(self, gate: Value, up: Value, function: str, scale: float = 1.0, limit: float = 0.0) -> Value:
        """function(scale * gate) * up. Raises ConfigError for a limit, or a function without a gradient."""
        if limit:
            raise ConfigError("models whose gates have a limit can be served, not trained: choose another")
        check_gradient(function)
        return super().gated(self.scale(gate, scale), up, function)

    def stateful(
        self, op: str, inputs: Sequence[Value], weights: Sequence[Weight | None], names: Sequence[str], **attrs: Any
    ) -> tuple[Value, ...]:
        """Emits the ops of training in place of those that keep states. Raises ConfigError if there are none."""
        if op == "short_conv":
            parts = zip(inputs, weights, names, strict=True)
            return tuple(self._emit("convolve", (x,), (w,), names=[name], activates=True) for x, w, name in parts)
        if op == "gated_conv" and len(inputs) == 3:
            b, c, x = inputs
            kernel = [w for w in weights if w]
            made = self._emit("convolve", (self.product(b, x),), kernel, names=["conv"], activates=False)
            return (self.product(c, made),)
        if op == "mamba2":
            return (self._mamba2(inputs, [w for w in weights if w], names, attrs["scales"], attrs["limits"]),)
        if op == "group_norm" and len(inputs) == 1:
            return self.emit(op, inputs, weights, names, **attrs)
        raise ConfigError(NOT_TRAINED)

    def _mamba2(
        self,
        inputs: Sequence[Value],
        weights: Sequence[Weight],
        names: Sequence[str],
        scales: Sequence[float],
        limits: Sequence[float],
    ) -> Value:
        """The ops of `mamba2`, with the same arguments."""
        of = dict(zip(("z", "x", "b", "c", "dt"), scales, strict=True))
        c, b, x, z, dt = (self.scale(v, of[n]) for v, n in zip(inputs, ("c", "b", "x", "z", "dt"), strict=True))
        (a_log, skip, dt_bias), bias = weights[3:6], weights[6:] or [None] * 3
        kernels = [[w for w in pair if w] for pair in zip(weights[:3], bias, strict=True)]
        parts = zip((c, b, x), kernels, "cbx", strict=True)
        q, k, v = (self._emit("convolve", (y,), own, names=[name], activates=True) for y, own, name in parts)
        more = {"tiled": False, "corrects": False, "dt_low": limits[0], "dt_high": limits[1]}
        o = self._emit("delta_packed", (q, k, v, dt), (a_log, dt_bias, skip), names, **more)
        return self.gated(z, o, "silu")

    def activate(self, x: Value, function: str) -> Value:
        """The square of ReLU, as a gate. Raises ConfigError for other functions."""
        if function != "relu2":
            raise ConfigError(f"models with the activation {function} can be served, not trained: choose another")
        return self.gated(x, x, "relu")

    def join(self, x: Value, y: Value, factor: float) -> Value:
        """The sum, by two ops that have gradients."""
        return self.add(x, self.scale(y, factor))

    def product(self, a: Value, b: Value) -> Value:
        """The product of the elements."""
        return self.emit("gated", (a, b), (), ["product"], function="identity")[0]

    def l2_norm(self, x: Value, eps: float, scale: float = 1.0) -> Value:
        """Emits nothing: `delta_packed` norms queries and keys."""
        self._norms[x] = eps, scale
        return x

    def delta_gates(self, a: Value, b: Value, a_log: Weight, dt_bias: Weight, **more: float) -> tuple[Value, Value]:
        """Emits nothing: `delta_packed` computes the gates."""
        self._gates[a] = (a_log, dt_bias), more
        return a, b

    def delta_rule(self, q: Value, k: Value, v: Value, decay: Value, beta: Value, *, layer: int, tiled: bool) -> Value:
        """The gated delta rule within each sequence of the batch."""
        del layer
        weights, more = self._gates[decay]
        eps, scale = self._norms[q]
        attrs = {"l2_eps": eps, "scale": scale, "beta_scale": 1.0, "decay_floor": 0.0, **more}
        return self._emit("delta_packed", (q, k, v, decay, beta), weights, ["o"], tiled=tiled, corrects=True, **attrs)

    def gated_norm(self, x: Value, gate: Value, w: Weight, eps: float, function: str = "silu") -> Value:
        """A norm of each head, and a gate."""
        return self.gated(gate, self.rms_norm(x, w, eps), function)

    def select_positions(self, *_: Any, **__: Any) -> Value:
        """Raises ConfigError: the choice of positions has no gradient."""
        raise ConfigError("models with sparse attention can be served, not trained: choose another model")

    def route(
        self,
        logits: Sequence[Value],
        correction: Weight | None,
        routing: Routing,
        shared: bool,  # noqa: ARG002 - `experts` computes the shared expert separately
        factors: Weight | None = None,
        table: tuple[Value, Weight] | None = None,
    ) -> tuple[Value, Value]:
        """The experts of each token and their shares, without a shared expert."""
        if factors is not None or table is not None:
            raise ConfigError(NOT_TRAINED)
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
        **more: Any,
    ) -> Value:
        """`Tracer.experts` in a form with gradients.

        Routed experts are one instruction that keeps the values for its gradient. The shared expert is made of linears.
        """
        check_gradient(function)
        if more:
            raise ConfigError(f"models whose experts have {', '.join(more)} can be served, not trained: choose another")
        own, shared = weights[:3], weights[3:]
        operands, matrices, attrs = (x, chosen, shares), *self._of_experts(own, biases)
        names = ["moe", "gate", "up", *(["low"] * len(attrs.get("adapted", ())))]
        chosen_sum = self.emit("grouped_experts", operands, matrices, names, function=function, **attrs)[0]
        if not shared:
            return chosen_sum
        a, b = self.linears(x, shared[:2], names=["gate", "up"])
        y = self.linear(self.gated(a, b, function), shared[2], names=["shared"])
        if shares in self._switches:
            y = self._emit("switched", (y, self._switches[shares]))
        return self.add(chosen_sum, y)

    def attend_latent(
        self,
        q: Value,
        kv: Value,
        w: LatentWeights,
        *,
        rope: str | None,
        scale: float,
        eps: float,
        window: int = 0,
        sinks: Weight | None = None,
        query_scale: QueryScale | None = None,
        **_: Any,
    ) -> Value:
        """Causal latent attention within each sequence, in the expanded form: each head has its own keys and values."""
        rank, nope = w.keys.dims[0].width, w.keys.dims[1].elements
        k = self.norm_latent(kv, w.norm, eps, *w.key_norm)
        if rope is not None:
            q, k = self.rope(q, rope, first=nope), self.rope(k, rope, first=rank)
        q = self.scale_queries(q, query_scale)
        keys = self._emit("latent_keys", (k,), (w.keys,), names=["keys"])
        latent = self._emit("latent_values", (k,), names=["latent"], dim=w.values.dims[1])
        values = self.linear(latent, w.values, names=["values"])
        return self.attend(q, keys, values, sinks, scale=scale, soft_cap=0.0, window=window)

    def cross_entropy(self, x: Value, targets: Value, head: Weight, soft_cap: float) -> Value:
        """The sum of losses of soft_cap(x @ head.T) over tokens with a target. Partial if tokens are sharded.

        Raises ConfigError if there are a teacher's temperature and a soft cap.
        """
        if (teacher := self.teacher) is not None:
            operands, names = (targets, *self.teacher_inputs), ["loss", "lse", "rest"]

            def emit(x: Value, own: float, its: float) -> Value:
                attrs = {"soft_cap": soft_cap, "target_weight": own, "teacher_weight": its}
                return self.emit("cross_entropy", (x, *operands), (head,), names, **attrs)[0]

            weight = teacher.weight * teacher.temperature**2
            if teacher.temperature == 1:
                return emit(x, 1 - teacher.weight, weight)
            if soft_cap:
                raise ConfigError(
                    f"a teacher with temperature {teacher.temperature:g} cannot teach a model with soft-capped logits: "
                    "use --temperature 1 of ckdist distill"
                )
            soft = emit(self.scale(x, 1 / teacher.temperature), 0.0, weight)
            return soft if teacher.weight == 1 else self.add(emit(x, 1 - teacher.weight, 0.0), soft)
        return self.emit("cross_entropy", (x, targets), (head,), ["loss", "lse"], soft_cap=soft_cap)[0]

    def balance_loss(self, targets: Value, coefficient: float) -> Value:
        """The load-balancing loss over the experts of all layers so far. Partial if tokens are sharded."""
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
    """Traces `loss(g, ids, targets, spec)`, the sum of losses over the tokens of all ranks. `backward` takes it."""
    g = tracer(layout, mesh)
    ids, targets = (Value(name, (g.sharding.tokens,), "i32") for name in ("ids", "targets"))
    inputs = (ids, targets, *g.teacher_inputs, *g.dropout_keys)
    return Program(inputs, (loss(g, ids, targets, spec),), tuple(g.instrs), tuple(g.boundaries))
