"""MiMo-V2-Flash: sliding layers have sinks and more kv-heads; values are narrower than keys, and scaled."""

from dataclasses import replace

from ckdist.models import from_config, limits, rope
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family, glm4moe
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

PERIOD, PART, LOCAL_THETA = 6, 0.334, 1e4
KEYS = ConfigKeys(
    {
        **sizes(hidden=4096, ffn=16384, layers=48, heads=64, kv_heads=4, head=192, positions=131072, vocab=152576),
        "attention_value_scale": 0.707, "hidden_act": "silu", "moe_intermediate_size": 2048, "n_group": 1,
        "n_routed_experts": 256, "norm_topk_prob": True, "num_experts_per_tok": 8, "partial_rotary_factor": PART,
        "rms_norm_eps": 1e-5, "rope_theta": 5e6, "routed_scaling_factor": 1.0, "sliding_window": 129, "topk_group": 1,
        "v_head_dim": 128,
    },
    aliases={"layernorm_epsilon": "rms_norm_eps", "num_local_experts": "n_routed_experts"},
    nulls={"attention_value_scale": 1.0},
    only={
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
        "attention_projection_layout": "split_qkv", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    unused=(
        *("attention_chunk_size", "hybrid_block_size", "moe_router_dtype"),
        *("hybrid_layer_pattern", "moe_layer_freq", "sliding_window", "swa_rope_theta"),  # published files repeat these
    ),
)  # fmt: skip


def kinds(f: Fields, name: str, published: str, words: tuple[str, str], otherwise: list[bool]) -> list[bool]:
    """True for each layer of the second kind: a list of words, or of 0 and 1 in published files."""
    for field, values in ((name, words), (published, (0, 1))):
        if (given := from_config.layer_kinds(f, len(otherwise), values, field)) is not None:
            return [kind == values[1] for kind in given]
    return otherwise


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    usual = [i > 0 and (i + 1) % PERIOD != 0 for i in range(n.num_layers)]
    sliding = kinds(f, "layer_types", "hybrid_layer_pattern", ("full_attention", "sliding_attention"), usual)
    sparse = kinds(f, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse"), [i > 0 for i in range(n.num_layers)])
    full = n.attention(
        qkv_bias=f.flag("attention_bias"),
        value_dim=f.integer("v_head_dim", high=limits.MAX_HEAD_DIM),
        output_scale=f.number("attention_value_scale", high=1e3),
    )
    heads = {"swa_num_attention_heads": full.num_heads, "swa_head_dim": n.head_dim, "swa_v_head_dim": full.value_dim}
    for name, must in heads.items():
        if f.integer(name, must, high=limits.MAX_WIDTH) != must:
            raise f.error(name, f.raw(name), f"{must}, as in full layers")
    window = f.integer("sliding_window_size", 0, high=limits.MAX_POSITION)  # without the query's own position
    slide = replace(
        full,
        num_kv_heads=f.integer("swa_num_key_value_heads", 2 * n.num_kv_heads, high=limits.MAX_HEADS),
        window=window + 1 if window else from_config.window(f), rope="local", sinks=True,
    )  # fmt: skip
    moe = from_config.experts(f, "n_routed_experts", "moe_intermediate_size", glm4moe.routing(f), correction_bias=True)
    dense, part = from_config.dense(f), from_config.part(f)
    ropes = from_config.rotations(f, n, part)
    if "local" not in ropes:
        shape = rope.RopeShape(n.head_dim, n.max_position, f.number("swa_rope_theta", LOCAL_THETA, low=1.0), part)
        ropes["local"] = rope.from_fields(f.sub("swa_rope_scaling"), shape, f)
    layers = [
        LayerSpec(slide if slides else full, moe if is_sparse else dense)
        for slides, is_sparse in zip(sliding, sparse, strict=True)
    ]
    return from_config.model(f, outer, n, layers, ropes)


FAMILY = Family(
    keys=KEYS,
    gguf="mimo2",
    from_config=config,
    to_gguf=GgufWriter(refused="serve its folder"),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers({"self_attn.attention_sink_bias": "self_attn.sinks"}),
    gguf_names=family.GGUF_EXPERTS,
)
