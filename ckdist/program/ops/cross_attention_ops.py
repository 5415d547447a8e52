"""Cross-attention: stores keys and values of the encoder's output in a cache, and attends over all of them."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ckdist.errors import LayoutError
from ckdist.program.cache import attention_cache
from ckdist.program.ops.op import lower, op, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering


def infer_store_cross(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """No outputs. Raises LayoutError if tokens are sharded, or keys and values do not fit together."""
    k, v = inputs
    whole("store_cross", *inputs)
    if k.dims[0].axis is not None:
        raise LayoutError(f"store_cross: tokens are sharded over {k.dims[0].axis}; shard heads")
    if replace(v.dims[-1], width=1) != replace(k.dims[-1], width=1):
        raise LayoutError(f"store_cross: keys [{k.dims[-1]}] and values [{v.dims[-1]}] do not fit together")
    return []


op("store_cross", infer_store_cross)


@lower("store_cross", "inference")
def lower_store_cross(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step."""
    instr = group.instr
    k, v = instr.inputs
    layer = instr.attrs["layer"]
    lowering.emit("store_cross", k=lowering.place_of(k), v=lowering.place_of(v), layer=layer)
    lowering.caches[layer] = attention_cache(instr.attrs["queries"], k.dims[-1], v.dims[-1], lowering.mesh)


def infer_attend_cross(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the queries, with the width of the values. Raises LayoutError if the heads do not fit together."""
    (q,), keys, values = inputs, attrs["keys"], attrs["values"]
    whole("attend_cross", q)
    heads = q.dims[-1]
    if heads.width != keys.width or heads.count % keys.count or heads.axis != keys.axis:
        raise LayoutError(f"attend_cross: queries [{heads}] and keys [{keys}] do not fit together")
    return [((q.dims[0], replace(heads, width=values.width)), None)]


op("attend_cross", infer_attend_cross)


@lower("attend_cross", "inference")
def lower_attend_cross(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step."""
    instr, attrs = group.instr, group.instr.attrs
    (q,), (o,), layer = instr.inputs, instr.outputs, attrs["layer"]
    out = lowering.buffer("arena", o.dims[-1].local(lowering.mesh))
    lowering.at[o.name] = out
    lowering.emit("attend_cross", q=lowering.place_of(q), out=out, layer=layer, scale=attrs["scale"])
    lowering.caches[layer] = attention_cache(q.dims[-1], attrs["keys"], attrs["values"], lowering.mesh)
