"""The gated short convolution of LFM2, for inference."""

from typing import TYPE_CHECKING

from ckdist.errors import LayoutError
from ckdist.program.cache import CacheArray, LayerCache
from ckdist.program.ops.delta_rule import head_results
from ckdist.program.ops.op import lower, op, unchanged_whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering


def infer_gated_conv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the kernel has other channels."""
    x, w = inputs[0].dims[-1], weights[0].dims[0]
    if (w.count, w.axis) != (x.count, x.axis) or w.width % x.width:
        raise LayoutError(f"gated_conv of [{x}] has a kernel of [{w}]: {weights[0]}")
    return unchanged_whole("gated_conv")(inputs, weights, attrs)


op("gated_conv", infer_gated_conv)


@lower("gated_conv", "inference")
def lower_gated_conv(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step, which also keeps the last products b * x of each sequence."""
    instr, (out,) = group.instr, group.instr.outputs
    b, c, x = map(lowering.place_of, instr.inputs)
    heads, kernel = out.dims[-1], instr.weight(0)
    place, exchanged = head_results(lowering, out)
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
