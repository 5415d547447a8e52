"""mix_streams: hyper-connections. Several streams of hidden states, which a part of a layer reads as one."""

from typing import TYPE_CHECKING

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import lower, op, unsharded, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights
from ckdist.program.step import ABSENT, ValueIndex

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering

MOST_STREAMS = 8  # as in runtime/steps/mix_streams.cpp


def infer_mix_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden); unless it is `last` also the streams and the coefficients for the next call."""
    y, *before = inputs
    whole("mix_streams", *inputs)
    unsharded("mix_streams", y)
    count, width = attrs["streams"], y.dims[-1].elements
    parts = count if attrs["last"] else count * (count + 2)
    needed = [parts * count * width, parts, 1 if attrs["last"] else 3]
    if count > MOST_STREAMS or [w.dims[0].elements for w in weights] != needed:
        given = ", ".join(map(str, weights))
        raise LayoutError(f"mix_streams: {count} streams of {width}, at most {MOST_STREAMS}, do not fit {given}")
    if before and before[0].dims[-1].elements != count * width:
        raise LayoutError(f"mix_streams: [{before[0].dims[-1]}] is not {count} streams of [{y.dims[-1]}]")
    tokens = y.dims[0]
    more = [(tokens, Dim("streams", count, width)), (tokens, Dim("coefs", count * (count + 1)))]
    return [(y.dims, None), *((dims, None) for dims in more if not attrs["last"])]


op("mix_streams", infer_mix_streams)


@lower("mix_streams", "inference")
def lower_mix_streams(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step."""
    instr = group.instr
    y, *before = map(lowering.place_of, instr.inputs)
    places = [lowering.buffer("arena", v.dims[-1].elements, rows=lowering.local_tokens) for v in instr.outputs]
    lowering.at |= {value.name: place for value, place in zip(instr.outputs, places, strict=True)}
    absent = ValueIndex(ABSENT)
    x, old = before or (absent, absent)
    # the last call keeps its streams to itself
    width = instr.attrs["streams"] * instr.inputs[0].dims[-1].elements
    total = lowering.buffer("arena", width, rows=lowering.local_tokens) if instr.attrs["last"] else places[1]
    lowering.emit(
        "mix_streams",
        x=x,
        y=y,
        old_coefs=old,
        sum=total,
        coefs=absent if instr.attrs["last"] else places[2],
        out=places[0],
        **dict(zip(("fn", "base", "scale"), map(lowering.vector, instr.weights), strict=True)),
        **{name: instr.attrs[name] for name in ("streams", "iterations", "eps", "norm_eps")},
    )
