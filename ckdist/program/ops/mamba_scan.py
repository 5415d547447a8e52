"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) for inference: convolutions, the states of heads, norms over groups.

The state of a sequence is in the state slots of the executor.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ckdist.errors import LayoutError
from ckdist.program.cache import state_cache
from ckdist.program.ops.delta_rule import head_results, key_heads
from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import lower, op, same, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights
from ckdist.program.step import ABSENT, ValueIndex, VectorIndex

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering


def infer_mamba2(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if heads, groups and kernels do not fit together."""
    c, b, x, z, dt = inputs
    whole("mamba2", *inputs)
    same("mamba2", c, b)
    same("mamba2", x, z)
    heads, groups = x.dims[-1], c.dims[-1]
    if dt.dims[-1] != replace(heads, width=1) or heads.count % groups.count or heads.axis != groups.axis:
        raise LayoutError(f"mamba2: heads [{heads}], groups [{groups}] and steps [{dt.dims[-1]}] do not fit")
    for value, w in zip((c, b, x), weights, strict=False):
        if replace(w.dims[0], width=value.dims[-1].width) != value.dims[-1] or w.dims[0].width % value.dims[-1].width:
            raise LayoutError(f"mamba2 of [{value.dims[-1]}] has a kernel of [{w.dims[0]}]: {w}")
    return [(x.dims, None)]


op("mamba2", infer_mamba2)


@lower("mamba2", "inference")
def lower_mamba2(lowering: "ServingLowering", group: "Group") -> None:
    """Emits the step of linear attention, without corrections by keys."""
    instr, attrs, (out,) = group.instr, group.instr.attrs, group.instr.outputs
    q, k, v, z, a = map(lowering.place_of, instr.inputs)
    place, exchanged = head_results(lowering, out)
    vectors = [lowering.vector(w) for w in instr.weights]
    biases = vectors[6:] or [VectorIndex(ABSENT)] * 3
    z_scale, x_scale, b_scale, c_scale, dt_scale = attrs["scales"]
    lowering.emit(
        "delta_rule",
        q=q,
        k=k,
        v=v,
        z=z,
        b=a,
        a=a,
        out=place,
        **dict(zip(("conv_q", "conv_k", "conv_v", "a_log", "skip", "dt_bias"), vectors, strict=False)),
        **dict(zip(("bias_q", "bias_k", "bias_v"), biases, strict=True)),
        norm=VectorIndex(ABSENT),
        layer=attrs["layer"],
        exchanged=exchanged,
        corrects=False,
        by_row=False,
        gate=GATES["silu"],
        eps=0.0,
        l2_eps=0.0,
        scale=1.0,
        beta_scale=1.0,
        decay_floor=0.0,
        q_scale=c_scale,
        k_scale=b_scale,
        v_scale=x_scale,
        gate_scale=z_scale,
        dt_scale=dt_scale,
        dt_low=attrs["limits"][0],
        dt_high=attrs["limits"][1],
    )
    heads, groups = out.dims[-1], instr.inputs[0].dims[-1]
    taps = instr.weight(2).dims[0].width // heads.width
    of = tuple(key_heads(groups, heads, False, lowering.mesh))
    states, cache = state_cache(groups, heads, taps, of), lowering.caches.get(attrs["layer"])
    if cache is not None:  # attention in the same layer
        states = replace(cache, arrays=(*cache.arrays, *states.arrays), key_head_of=of)
    lowering.caches[attrs["layer"]] = states


def infer_head_squares(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """One number for each head. Partial if heads are sharded."""
    (x,) = inputs
    whole("head_squares", x)
    heads = x.dims[-1]
    return [((x.dims[0], replace(heads, name="squares", width=1, axis=None, unit=1)), heads.axis)]


op("head_squares", infer_head_squares)


@lower("head_squares", "inference")
def lower_head_squares(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step."""
    (x,), (out,) = group.instr.inputs, group.instr.outputs
    heads = x.dims[-1]
    (place,) = lowering.results([out])
    first, source = heads.share(lowering.mesh)[0], lowering.place_of(x)
    sizes = {"heads": heads.count, "first_head": first, "head_width": heads.width}
    lowering.emit("head_squares", x=source, out=place, **sizes)
    lowering.at[out.name] = place


def infer_group_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if heads are sharded and there are no sums of squares."""
    x, *squares = inputs
    whole("group_norm", *inputs)
    if weights[0].dims[-1] != x.dims[-1] or x.dims[-1].count % attrs["groups"]:
        raise LayoutError(f"group_norm of [{x.dims[-1]}] in {attrs['groups']} groups has a weight of {weights[0]}")
    if x.dims[-1].axis and not squares:
        raise LayoutError(f"group_norm of sharded heads [{x.dims[-1]}] needs the sums of squares")
    return [(x.dims, None)]


op("group_norm", infer_group_norm)


@lower("group_norm", "inference")
def lower_group_norm(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step. If ranks have exchanged heads for tokens, it reads each rank's heads in that rank's slot."""
    instr, (out,) = group.instr, group.instr.outputs
    x, *squares = instr.inputs
    heads, exchange = x.dims[-1], lowering.graph.maker(x, "all_to_all")
    dim = exchange.inputs[0].dims[-1] if exchange else heads
    ends = [dim.share(mesh)[1] for mesh in lowering.peers] if exchange else []
    weight = instr.weight(0)
    norm = lowering.shard_vectors(weight, lowering.pieces(heads)) if exchange else lowering.vector(weight)
    place = lowering.buffer("arena", heads.local(lowering.mesh), rows=lowering.most_rows(out), selected=out.selected)
    lowering.at[out.name] = place
    lowering.emit(
        "group_norm",
        x=lowering.place_of(x),
        squares=lowering.place_of(squares[0]) if squares else ValueIndex(ABSENT),
        norm=norm,
        out=place,
        heads=heads.count,
        first_head=heads.share(lowering.mesh)[0],
        head_width=heads.width,
        groups=instr.attrs["groups"],
        parts=len(ends),
        ends=ends,
        eps=instr.attrs["eps"],
    )
