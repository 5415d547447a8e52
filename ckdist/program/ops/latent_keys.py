"""Latent attention in the expanded form, for training: latent_keys and latent_values.

latent_keys makes the keys of each head. latent_values is the latent part, from which a linear makes the values.
DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import TrainingLowering, lower, op, unsharded, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value


def infer_latent_keys(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """Heads of width nope + rope. Raises LayoutError if k has fewer elements than the latent vector."""
    (k,), (w,) = inputs, weights
    unsharded("latent_keys", k)
    heads, columns = w.dims
    rope = k.dims[-1].elements - heads.width
    if rope < 0:
        raise LayoutError(f"latent_keys: %{k.name} ends in [{k.dims[-1]}], {w} reads {heads.width} elements")
    return [((k.dims[0], replace(heads, width=columns.elements + rope)), None)]


def by_head(w: np.ndarray, attrs: Attrs) -> np.ndarray:
    """Reshapes a weight from (heads * rank, nope) to (heads, rank, nope)."""
    return w.reshape(-1, attrs["weights"][0].dims[0].width, w.shape[1])


@op("latent_keys", infer_latent_keys)
def latent_keys(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: [k[:rank] @ w_head, k[rank:]]. All heads share the rotated part k[rank:].

    k: (tokens, rank + rope), w: (heads * rank, nope) -> (tokens, heads * (nope + rope)).
    """
    (k,), w = inputs, by_head(weights[0], attrs)
    rank, tokens = w.shape[1], len(k)
    own = np.einsum("tr,hrn->thn", k[:, :rank], w)
    shared = np.broadcast_to(k[:, None, rank:], (tokens, len(w), k.shape[1] - rank))
    return [np.concatenate([own, shared], axis=-1).reshape(tokens, -1)]


@lower("latent_keys", "training")
def lower_latent_keys(lowering: TrainingLowering, instr: Instr) -> None:
    (x,), w = map(lowering.operand, instr.inputs), instr.weight(0)
    out = lowering.output(instr.outputs[0])
    lowering.emit("latent_keys", x=x, out=out, weight=lowering.parameter(w), rank=w.dims[0].width)


@vjp("latent_keys")
def latent_keys_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """At most two instructions, for the gradients of the latent vectors and of the matrices."""
    results: Gradients = [None, None]
    w, k = instr.weight(0), instr.inputs[0]
    if wanted[1]:
        results[1] = g.emit("latent_keys_weight_grad", (k, grads[0]), (w,), [f"d_{w.name}"])[0]
    if wanted[0]:
        results[0] = g.emit("latent_keys_grad", (grads[0],), (w,), ["d_latent"], dim=k.dims[-1])[0]
    return results


def infer_latent_keys_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of k, partial if heads are sharded."""
    return [((inputs[0].dims[0], attrs["dim"]), weights[0].dims[0].axis)]


@op("latent_keys_grad", infer_latent_keys_grad)
def latent_keys_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[sum over heads of dy[:nope] @ w_head.T, sum over heads of dy[nope:]]."""
    w = by_head(weights[0], attrs)
    dy, nope = inputs[0].reshape(len(inputs[0]), len(w), -1), w.shape[2]
    return [np.concatenate([np.einsum("thn,hrn->tr", dy[..., :nope], w), dy[..., nope:].sum(axis=1)], axis=-1)]


@lower("latent_keys_grad", "training")
def lower_latent_keys_grad(lowering: TrainingLowering, instr: Instr) -> None:
    (dy,), w = map(lowering.operand, instr.inputs), instr.weight(0)
    dx = lowering.output(instr.outputs[0])
    lowering.emit("latent_keys_grad", dy=dy, dx=dx, weight=lowering.parameter(w), rank=w.dims[0].width)


def infer_latent_keys_weight_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the matrices, partial if tokens are sharded."""
    return [(weights[0].dims, inputs[0].dims[0].axis)]


@op("latent_keys_weight_grad", infer_latent_keys_weight_grad)
def latent_keys_weight_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: k[:rank].T @ dy[:nope]."""
    k, dy = inputs
    heads, rank, nope = by_head(weights[0], attrs).shape
    of_heads = dy.reshape(len(dy), heads, -1)[..., :nope]
    return [np.einsum("tr,thn->hrn", k[:, :rank], of_heads).reshape(weights[0].shape)]


@lower("latent_keys_weight_grad", "training")
def lower_latent_keys_weight_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which adds to the gradient of the matrices."""
    (x, dy), (out,) = map(lowering.operand, instr.inputs), instr.outputs
    gradient = {"gradient": lowering.gradient(out), "fresh": lowering.is_fresh(out)}
    lowering.emit("latent_keys_weight_grad", x=x, dy=dy, **gradient, rank=instr.weight(0).dims[0].width)


def infer_latent_values(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The first elements of the keys. Raises LayoutError if there are fewer."""
    (k,) = inputs
    if k.dims[-1].elements < attrs["dim"].elements:
        raise LayoutError(f"latent_values: %{k.name} ends in [{k.dims[-1]}], and [{attrs['dim']}] are wanted")
    return [((k.dims[0], attrs["dim"]), None)]


@op("latent_values", infer_latent_values)
def latent_values(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The first elements of the keys: the latent vectors."""
    return [inputs[0][:, : attrs["dim"].elements]]


@lower("latent_values", "training")
def lower_latent_values(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step that copies."""
    lowering.emit_rows("convert", instr, "x")


@vjp("latent_values")
def latent_values_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction, which pads the gradient with zeros."""
    return [*g.emit("latent_values_grad", (grads[0],), names=["d_values"], dim=instr.inputs[0].dims[-1])]


def infer_latent_values_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the keys."""
    return [((inputs[0].dims[0], attrs["dim"]), None)]


@op("latent_values_grad", infer_latent_values_grad)
def latent_values_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The gradient, padded with zeros at the end."""
    dim: Dim = attrs["dim"]
    return [np.pad(inputs[0], ((0, 0), (0, dim.elements - inputs[0].shape[1])))]


@lower("latent_values_grad", "training")
def lower_latent_values_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step that copies."""
    lowering.emit_rows("convert", instr, "x")
