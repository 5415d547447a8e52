"""The ops: what each infers from its operands' dimensions, and its definition in numpy.

`infer` holds the placement rules: it says where a result is cut or partial, and refuses what would need a collective that
the forward did not write. `reference` is the op's meaning on one rank's arrays; collectives get every rank's.
`vjp` is for the training transform.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.program import Value, Weight


@dataclass(frozen=True)
class Op:
    """`infer(inputs, weights, attrs)` -> list of (dims, partial); `reference(context, inputs, weights, attrs)` -> list of arrays.

    A collective's reference takes and returns one entry per rank in place of each array.
    """

    name: str
    infer: Callable
    reference: Callable
    vjp: Callable | None = None
    collective: bool = False


OPS: dict[str, Op] = {}


def op(name: str, infer: Callable, collective: bool = False):
    """Registers the decorated function as the reference of op `name`."""

    def register(reference):
        OPS[name] = Op(name, infer, reference, collective=collective)
        return reference

    return register


def whole(instr: str, value: Value) -> None:
    """Refuses a partial value where a whole one is needed."""
    if value.partial:
        raise LayoutError(f"{instr} needs a whole value, but %{value.name} is partial over {value.partial}: wrap it in g.reduce()")


def uncut(instr: str, value: Value) -> None:
    """Refuses a value whose last dimension is cut."""
    if value.dims[-1].axis:
        raise LayoutError(f"{instr} needs all of {value.dims[-1].name}, but %{value.name} has it cut over {value.dims[-1].axis}")


def same(instr: str, a: Value, b: Value) -> None:
    """Refuses two values of different dimensions."""
    if a.dims != b.dims:
        raise LayoutError(f"{instr} needs equal dimensions: %{a.name} is [{', '.join(map(str, a.dims))}], %{b.name} [{', '.join(map(str, b.dims))}]")


def infer_embed(inputs, weights, attrs):
    (ids,), (table,) = inputs, weights
    return [((ids.dims[0], table.dims[1]), table.dims[0].axis)]


@op("embed", infer_embed)
def embed(context, inputs, weights, attrs):
    """Rows of the table; zeros for ids of another rank's part of the vocabulary."""
    (ids,), (table,) = inputs, weights
    begin, end = context.share(attrs["weights"][0].dims[0])
    mine = (ids >= begin) & (ids < end)
    return [np.where(mine[:, None], table[np.where(mine, ids - begin, 0)] if end > begin else 0, 0).astype(np.float32)]  # (tokens, hidden)


def infer_elementwise(inputs, weights, attrs):
    return [(inputs[0].dims, inputs[0].partial)]


@op("scale", infer_elementwise)
def scale(context, inputs, weights, attrs):
    return [inputs[0] * np.float32(attrs["factor"])]


def infer_soft_cap(inputs, weights, attrs):
    whole("soft_cap", inputs[0])
    return infer_elementwise(inputs, weights, attrs)


@op("soft_cap", infer_soft_cap)
def soft_cap(context, inputs, weights, attrs):
    """cap * tanh(x / cap). Gemma 2, arXiv:2408.00118, section 2."""
    cap = np.float32(attrs["cap"])
    return [cap * np.tanh(inputs[0] / cap)]


def infer_rms_norm(inputs, weights, attrs):
    (x,), (w,) = inputs, weights
    whole("rms_norm", x)
    if w.dims[-1].elements != x.dims[-1].width:  # not a norm per head
        uncut("rms_norm", x)
        if w.dims[-1].elements != x.dims[-1].elements:
            raise LayoutError(f"rms_norm of {x.dims[-1].elements} elements has a weight of {w.dims[-1].elements}: {w}")
    return [(x.dims, None)]


@op("rms_norm", infer_rms_norm)
def rms_norm(context, inputs, weights, attrs):
    """x / sqrt(mean(x^2) + eps) * w over the last dimension, or per head. Zhang & Sennrich 2019, arXiv:1910.07467."""
    (x,), (w,) = inputs, weights
    rows = x.reshape(*x.shape[:-1], -1, w.shape[-1])  # (tokens, groups, n)
    rows = rows / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(attrs["eps"])) * w
    return [rows.reshape(x.shape).astype(np.float32)]


def infer_linear(inputs, weights, attrs):
    (x,) = inputs
    whole("linear", x)
    matrices = weights[: len(weights) // 2]
    outputs = []
    for w in matrices:
        out_dim, in_dim = w.dims
        if in_dim != x.dims[-1]:
            raise LayoutError(f"linear: %{x.name} ends in [{x.dims[-1]}], {w} reads [{in_dim}]")
        outputs.append(((*x.dims[:-1], out_dim), in_dim.axis))
    return outputs


@op("linear", infer_linear)
def linear(context, inputs, weights, attrs):
    """x @ w.T + bias for each (w, bias). Where the input is cut, the result is partial and the first rank adds the bias."""
    (x,) = inputs
    count = len(weights) // 2
    results = []
    for w, bias, declared in zip(weights[:count], weights[count:], attrs["weights"]):
        y = x @ w.T  # (tokens, out)
        if bias is not None and context.adds_bias(declared.dims[1]):
            y = y + bias
        results.append(y.astype(np.float32))
    return results


def infer_rope(inputs, weights, attrs):
    whole("rope", inputs[0])
    return [(inputs[0].dims, None)]


@op("rope", infer_rope)
def rope(context, inputs, weights, attrs):
    """Rotates the halves of every head by position times frequency. Su et al. 2021, arXiv:2104.09864."""
    (x,) = inputs
    cos, sin = context.rope_tables(attrs["table"])  # (tokens, head_dim / 2)
    half = cos.shape[-1]
    heads = x.reshape(x.shape[0], -1, 2, half)  # (tokens, heads, 2, head_dim / 2)
    a, b = heads[:, :, 0], heads[:, :, 1]
    c, s = cos[:, None], sin[:, None]
    return [np.stack([a * c - b * s, b * c + a * s], axis=2).reshape(x.shape).astype(np.float32)]


def infer_attend(inputs, weights, attrs):
    q, k, v = inputs
    for value in inputs:
        whole("attend", value)
    same("attend", k, v)
    heads, kv_heads = q.dims[-1], k.dims[-1]
    if heads.size % kv_heads.size:
        raise LayoutError(f"attend: num_heads ({heads.size}) is not a multiple of num_kv_heads ({kv_heads.size})")
    if heads.axis != kv_heads.axis:
        raise LayoutError(f"attend: heads are cut over {heads.axis}, kv_heads over {kv_heads.axis}; cut both or neither")
    return [(q.dims, None)]


@op("attend", infer_attend)
def attend(context, inputs, weights, attrs):
    """Causal grouped-query attention over the cache, which the call extends. Vaswani et al. 2017, arXiv:1706.03762."""
    q, k, v = inputs
    q_dim, kv_dim = attrs["inputs"][0].dims[-1], attrs["inputs"][1].dims[-1]
    head_dim, group = q_dim.width, q_dim.size // kv_dim.size
    tokens = q.shape[0]
    k_all, v_all = context.extend_cache(attrs["layer"], k.reshape(tokens, -1, head_dim), v.reshape(tokens, -1, head_dim))
    first = k_all.shape[0] - tokens
    positions = np.arange(k_all.shape[0])
    own = first + np.arange(tokens)
    visible = positions[None] <= own[:, None]  # (tokens, positions)
    if attrs["window"]:
        visible &= positions[None] > own[:, None] - attrs["window"]
    out = np.zeros((tokens, q.shape[1] // head_dim, head_dim), np.float32)  # (tokens, heads, head_dim)
    head_begin, kv_begin = context.share(q_dim)[0], context.share(kv_dim)[0]
    for h in range(out.shape[1]):
        kv = (head_begin + h) // group - kv_begin
        scores = q[:, h * head_dim : (h + 1) * head_dim] @ k_all[:, kv].T * np.float32(attrs["scale"])  # (tokens, positions)
        if attrs["soft_cap"]:
            scores = attrs["soft_cap"] * np.tanh(scores / attrs["soft_cap"])
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = p / p.sum(axis=-1, keepdims=True) @ v_all[:, kv]
    return [out.reshape(q.shape)]


def infer_gated(inputs, weights, attrs):
    for value in inputs:
        whole("gated", value)
    same("gated", *inputs)
    return [(inputs[0].dims, None)]


@op("gated", infer_gated)
def gated(context, inputs, weights, attrs):
    """f(gate) * up with f SiLU or the tanh form of GELU. Shazeer 2020, arXiv:2002.05202."""
    gate, up = inputs
    if attrs["function"] == "silu":
        return [gate / (1 + np.exp(-gate)) * up]
    inner = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * gate**3)
    return [(0.5 * gate * (1 + np.tanh(inner)) * up).astype(np.float32)]


def infer_add(inputs, weights, attrs):
    for value in inputs:
        whole("add", value)
    same("add", *inputs)
    return [(inputs[0].dims, None)]


@op("add", infer_add)
def add(context, inputs, weights, attrs):
    return [inputs[0] + inputs[1]]


def infer_take(inputs, weights, attrs):
    whole("take", inputs[0])
    return [((attrs["dim"], *inputs[0].dims[1:]), None)]


@op("take", infer_take)
def take(context, inputs, weights, attrs):
    """The rows whose logits are wanted."""
    return [inputs[0][context.output_tokens]]


def infer_all_reduce(inputs, weights, attrs):
    return [(inputs[0].dims, None)]


@op("all_reduce", infer_all_reduce, collective=True)
def all_reduce(contexts, inputs, attrs):
    """The sum over ranks in the order of ranks, in float32."""
    total = inputs[0][0]
    for (part,) in inputs[1:]:
        total = total + part
    return [[total] for _ in inputs]


def infer_all_gather(inputs, weights, attrs):
    *lead, last = inputs[0].dims
    whole("all_gather", inputs[0])
    return [((*lead, replace(last, axis=None)), None)]


@op("all_gather", infer_all_gather, collective=True)
def all_gather(contexts, inputs, attrs):
    """The ranks' parts of the last dimension side by side."""
    joined = np.concatenate([part for (part,) in inputs], axis=-1)
    return [[joined] for _ in inputs]


def weight(name: str, *dims) -> Weight:
    return Weight(name, dims)
