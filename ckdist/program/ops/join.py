"""join: x + factor * y, of parts of a layer that read the same input. The sum is in memory before the next part."""

import numpy as np

from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import ServingLowering, alike, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, RankContext
from ckdist.program.step import ABSENT, NO_SPAN, ValueIndex, VectorIndex


@op("join", alike("join"))
def join(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x + factor * y. In training it is a product and a sum (`TrainingTracer.join`)."""
    return [inputs[0] + np.float32(attrs["factor"]) * inputs[1]]


@lower("join", "inference")
def lower_join(lowering: ServingLowering, group: Group) -> None:
    """Emits a norm_quantize without a norm and without activations."""
    (out,), (x, y) = group.instr.outputs, map(lowering.place_of, group.instr.inputs)
    by_host, width = y in lowering.of_hosts, lowering.buffers[x].width
    total = lowering.buffer("arena", width, rows=lowering.local_tokens, selected=out.selected)
    lowering.at[out.name] = total
    if by_host:
        lowering.of_hosts.add(total)
    lowering.emit(
        "norm_quantize",
        "host" if by_host else out.rows,
        x=x,
        y=y,
        gate=ValueIndex(ABSENT),
        gate_function=GATES["none"],
        gate_width=0,
        **dict.fromkeys(("post_norm", "norm", "norm_bias", "scalar"), VectorIndex(ABSENT)),
        **dict.fromkeys(("post_eps", "eps"), 0.0),
        post_factor=group.instr.attrs["factor"],
        factor=1.0,
        centred=False,
        sum=total,
        normed=ValueIndex(ABSENT),
        activations=[NO_SPAN] * 3,
        gather=False,
        gather_sum=False,
    )
