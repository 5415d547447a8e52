"""Llama 4: attention within chunks, layers without rotation, and experts whose inputs are scaled by their shares."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama, smollm3
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, DenseFfn, Ffn, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.query_scale import QueryScale
from ckdist.program.routing import Routing

PERIOD, CHUNK, THETA = 4, 8192, 5e5
SCALE = QueryScale(0.1, CHUNK, from_one=True)  # GGUF readers know these numbers, and norms unless there are 128 experts
ROUTING = Routing(used=1, scores="sigmoid", renormalise=False)
KEYS = llama.KEYS.but(
    defaults={
        **sizes(hidden=5120, ffn=8192, layers=48, heads=40, kv_heads=8, head=128, positions=131072, vocab=202048),
        "attention_chunk_size": CHUNK, "attn_scale": SCALE.beta, "attn_temperature_tuning": True, "floor_scale": CHUNK,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "no_rope_layer_interval": PERIOD,
        "num_experts_per_tok": 1, "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": THETA,
        "use_qk_norm": True,
    },
    nulls={"attention_chunk_size": None, "num_key_value_heads": None},
    unused=("router_aux_loss_coef", "attn_scale", "floor_scale", "for_llm_compressor"),
)  # fmt: skip


def layers_of(
    base: Attention,
    chunk: int,
    rotated: list[bool],
    chunked: list[bool],
    scale: QueryScale | None,
    ffns: Sequence[Ffn],
) -> list[LayerSpec]:
    """Makes the layers."""
    turning, still = replace(base, norms_rotated=True), replace(base, qk_norm="", rope=None, query_scale=scale)
    parts = zip(rotated, chunked, ffns, strict=True)
    return [LayerSpec(replace(turning if turns else still, chunk=chunk * cut), ffn) for turns, cut, ffn in parts]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    base = n.attention(qkv_bias=bias, o_bias=bias, qk_norm="unit" if f.flag("use_qk_norm") else "")
    period = f.integer("no_rope_layer_interval")
    derived = [(i + 1) % period != 0 for i in range(n.num_layers)]
    rotated = smollm3.rotated_layers(f, n.num_layers) if f.raw("no_rope_layers") else derived
    chunk = f.integer("attention_chunk_size", 0, high=limits.MAX_POSITION)
    chunked = from_config.layers_of_kind(f, n.num_layers, rotated, "chunked_attention", "full_attention")
    beta, context = f.number("attn_scale", high=1e3), f.integer("floor_scale", high=limits.MAX_POSITION)
    tuned = f.raw("attn_temperature_tuning")
    if type(tuned) not in (bool, int):  # 4 in published files
        raise f.error("attn_temperature_tuning", tuned, "true or false")
    scale = QueryScale(beta, context, from_one=True) if tuned else None
    moe = from_config.experts(f, "num_local_experts", "intermediate_size", ROUTING, shares_input=True)
    moe = replace(moe, shared_size=moe.intermediate_size)
    dense = DenseFfn(f.integer("intermediate_size_mlp", high=limits.MAX_FFN), moe.activation)
    step, listed = f.integer("interleave_moe_layer_step", high=limits.MAX_LAYERS), f.raw("moe_layers")
    if listed is not None and not (isinstance(listed, list) and all(type(i) is int for i in listed)):
        raise f.error("moe_layers", listed, "a list of layers")
    with_experts = range(step - 1, n.num_layers, step) if listed is None else listed
    ffns = [moe if i in with_experts else dense for i in range(n.num_layers)]
    layers = layers_of(base, chunk, rotated, chunked, scale, ffns)
    return from_config.model(f, outer, n, layers, from_config.rotations(f, n, interleaved=True))


def gguf(header: GgufHeader) -> ModelSpec:
    f, n = header.fields, header.sizes()
    moe = replace(header.experts(ROUTING, shared=True), shares_input=True)
    dense, step = header.dense(), f.integer("interleave_moe_layer_step", high=limits.MAX_LAYERS)
    chunk = CHUNK * (f.integer("attention.sliding_window", 1, low=0, high=limits.MAX_POSITION) > 0)
    rotated = [not chunk or (i + 1) % PERIOD != 0 for i in range(n.num_layers)]
    base = replace(header.attention(n), qk_norm="" if moe.num_experts == 128 else "unit")
    ffns = [dense if (i + 1) % step else moe for i in range(n.num_layers)]
    layers = layers_of(base, chunk, rotated, rotated, SCALE, ffns)
    return header.model(n, layers, {"global": header.rotation(n, THETA, interleaved=True)})


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for numbers that GGUF readers do not know."""
    with_experts = [i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeFfn)]
    if not with_experts:
        raise ArchitectureError(f"{where}: llama4 without experts has no GGUF form")
    step, moe = with_experts[0] + 1, spec.layers[with_experts[0]].ffn
    assert isinstance(moe, MoeFfn)
    dense = next((one.ffn for one in spec.layers if isinstance(one.ffn, DenseFfn)), DenseFfn(moe.intermediate_size))
    first = spec.layers[0].attention
    chunked = first.chunk > 0
    rotated = [not chunked or (i + 1) % PERIOD != 0 for i in range(len(spec.layers))]
    norm = "" if moe.num_experts == 128 else "unit"
    a = replace(first, rope="global", qk_norm=norm, query_scale=None, norms_rotated=False, chunk=0)
    ffns = [dense if (i + 1) % step else moe for i in range(len(spec.layers))]
    if layers_of(a, CHUNK * chunked, rotated, rotated, SCALE, ffns) != list(spec.layers):
        raise ArchitectureError(
            f"{where}: GGUF readers know a llama4 with chunks of {CHUNK} tokens and a layer without rotation every "
            f"{PERIOD} layers; other numbers have no GGUF form"
        )
    return {
        "feed_forward_length": dense.intermediate_size,
        "interleave_moe_layer_step": step,
        "expert_count": moe.num_experts,
        "expert_used_count": moe.routing.used,
        "expert_feed_forward_length": moe.intermediate_size,
        "rope.dimension_count": a.head_dim,
        **({} if chunked else {"attention.sliding_window": 0}),
    }


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, factors=True),
    safetensors=family.SAFETENSORS.but_in_layers(
        {
            "feed_forward.router": "mlp.gate",
            **family.stacked("feed_forward.experts"),
            **family.renamed("feed_forward.{}_proj", "mlp.{}_proj"),
            **family.renamed("feed_forward.shared_expert.{}_proj", "mlp.shared_expert.{}_proj"),
        },
        family.STACKED_EXPERTS,
        (family.STACKED_EXPERTS[0], "transposed"),
    ),
    gguf_names=family.GGUF_EXPERTS,
)  # fmt: skip
