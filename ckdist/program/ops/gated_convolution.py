"""Short convolutions for inference: the gated one of LFM2, and that of Mamba-1, without gates and with SiLU."""

from ckdist.errors import LayoutError
from ckdist.program.cache import CacheArray, LayerCache
from ckdist.program.ops.delta_rule import silu
from ckdist.program.ops.op import ServingLowering, alike, lower, op, total
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.step import ABSENT, ValueIndex


def infer_gated_conv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the kernel has other channels."""
    x, w = inputs[-1].dims[-1], weights[0].dims[0]
    if (w.count, w.axis) != (x.count, x.axis) or w.width % x.width:
        raise LayoutError(f"gated_conv of [{x}] has a kernel of [{w}]: {weights[0]}")
    return alike("gated_conv")(inputs, weights, attrs)


@op("gated_conv", infer_gated_conv)
def gated_conv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns c * (bias + sum over i of w[:, i] * (b * x)[t - taps + 1 + i]), with zeros before the sequence.

    x alone: silu(bias + sum over i of w[:, i] * x[t - taps + 1 + i]).
    """
    *gates, x = inputs
    kernel, *bias = weights
    taps = attrs["weights"][0].dims[0].width // attrs["inputs"][-1].dims[-1].width
    kernel = kernel.reshape(x.shape[1], taps)  # (channels, taps)
    # (taps - 1 + tokens, channels)
    rows = context.with_last(attrs["layer"], "x", gates[0] * x if gates else x, taps - 1)
    result = total(rows[i : i + len(x)] * kernel[:, i] for i in range(taps))
    result = result + bias[0] if bias else result
    return [gates[1] * result if gates else silu(result)]


@lower("gated_conv", "inference")
def lower_gated_conv(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also keeps the last products b * x of each sequence."""
    instr, (out,) = group.instr, group.instr.outputs
    *gates, x = map(lowering.place_of, instr.inputs)
    b, c = gates or [ValueIndex(ABSENT)] * 2
    heads, kernel = out.dims[-1], instr.weight(0)
    place, exchanged = lowering.head_results(out)
    bias = instr.weights[1] if len(instr.weights) > 1 else None
    lowering.emit(
        "gated_conv",
        b=b,
        c=c,
        x=x,
        out=place,
        conv=lowering.vector(kernel),
        bias=lowering.vector(bias),
        layer=instr.attrs["layer"],
        exchanged=exchanged,
    )
    taps = kernel.dims[0].width // heads.width
    begin, end = heads.share(lowering.mesh)
    tail = CacheArray("convolution", end - begin, heads.width, taps - 1, "sequence")
    lowering.caches[instr.attrs["layer"]] = LayerCache((tail,))
