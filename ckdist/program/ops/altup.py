"""Alternating updates: altup_predict and altup_correct mix streams, match_rms makes and merges them."""

from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import ServingLowering, lower, op, same, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.program import Value
from ckdist.program.step import ABSENT, Span, ValueIndex, VectorIndex


def infer_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of each operand. Raises LayoutError if operands or weights do not fit together."""
    same("altup", *inputs)
    unsharded("altup", inputs[0])
    if weights and weights[1].dims[0].elements % weights[0].dims[0].elements:
        raise LayoutError(f"altup: {weights[1]} is not a row of {weights[0]} for each stream")
    return [(inputs[0].dims, None) for _ in inputs]


def _coefficients(v: np.ndarray, weights: Arrays, eps: float) -> np.ndarray:
    """Returns coefs * tanh(router * rms_norm(v) / width): (tokens, rows of coefs)."""
    norm, router, coefs = weights[:3]
    router = router.reshape(-1, v.shape[-1])
    modalities = np.tanh((v * inverse_rms(v, eps) * norm) @ router.T / np.float32(v.shape[-1]))
    return modalities @ coefs.reshape(-1, len(router)).T


@op("altup_predict", infer_streams)
def altup_predict(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """x[j] + sum over i of c[j, i] * x[i]. Baykal et al. 2023, arXiv:2301.13310, algorithm 1. It has no gradient."""
    c = _coefficients(inputs[0], weights, attrs["eps"]).reshape(-1, len(inputs), len(inputs))
    x = np.stack(inputs, axis=1)  # (tokens, streams, width)
    return list((x + c @ x).swapaxes(0, 1))


@op("altup_correct", infer_streams)
def altup_correct(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """x[j] + (1 + c[j]) * (y - x[0]), then the first of these times a weight. It has no gradient."""
    *x, y = inputs
    c = _coefficients(y, weights, attrs["eps"])
    corrected = [one + (1 + c[:, j : j + 1]) * (y - x[0]) for j, one in enumerate(x)]
    return [*corrected, corrected[0] * weights[3]]


@lower("altup_predict", "inference")
def lower_predict(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    inputs, outputs = group.instr.inputs, group.instr.outputs
    _emit(lowering, group, list(inputs), list(outputs), y=ValueIndex(ABSENT), active=ValueIndex(ABSENT))


@lower("altup_correct", "inference")
def lower_correct(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    (*x, y), (*outputs, active) = group.instr.inputs, group.instr.outputs
    (place,) = lowering.own_rows(active)
    _emit(lowering, group, x, outputs, y=lowering.place_of(y), active=place)


def _emit(lowering: ServingLowering, group: Group, inputs: list[Value], outputs: list[Value], **operands: Any) -> None:
    places, weights = lowering.own_rows(*outputs), [*map(lowering.vector, group.instr.weights), VectorIndex(ABSENT)]
    lowering.emit(
        "altup",
        count=len(inputs),
        x=[lowering.place_of(value) for value in inputs],
        out=Span(places[0], len(places)),
        **operands,
        **dict(zip(("norm", "router", "coefs", "scale"), weights, strict=False)),
        eps=group.instr.attrs["eps"],
    )


def infer_match_rms(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of each operand, or of one if the mean is wanted."""
    outputs = infer_streams(inputs, weights, attrs)
    return outputs[:1] if attrs.get("mean") else outputs


@op("match_rms", infer_match_rms)
def match_rms(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The first operand, and each other one times rms(first) / rms(it); with `mean` their mean. It has no gradient."""
    first, *others = inputs
    square = lambda x: np.mean(x * x, axis=-1, keepdims=True)
    size = np.sqrt(square(first))
    matched = [first, *(x * size / np.sqrt(np.maximum(square(x), np.float32(attrs["least"]))) for x in others)]
    return [np.mean(matched, axis=0)] if attrs.get("mean") else matched


@lower("match_rms", "inference")
def lower_match_rms(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    places = lowering.own_rows(*group.instr.outputs)
    lowering.emit(
        "match_rms",
        count=len(group.instr.inputs),
        x=[lowering.place_of(value) for value in group.instr.inputs],
        out=Span(places[0], len(places)),
        least=group.instr.attrs["least"],
    )
