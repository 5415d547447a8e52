"""Nemotron-H and Nemotron 3 Nano: each layer is Mamba-2, attention without rotation, a feed-forward, or experts.

Feed-forwards and experts have no gate: down(relu(up x)^2).
"""

from dataclasses import replace

from ckdist.models import from_config, limits, mamba2_fields
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family, glm4moe
from ckdist.models.families.family import Family, Fields, GgufForm, GgufHeader, in_layers
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, MoeFfn, Norms
from ckdist.models.state_mixers import Mamba2
from ckdist.program.routing import Routing

ACTIVATION = "relu2"
KEYS = ConfigKeys(
    {
        **sizes(hidden=4096, ffn=21504, layers=0, heads=32, kv_heads=8, head=128, positions=4096, vocab=131072),
        "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_head_dim": 64,
        "mamba_num_heads": 128, "mlp_hidden_act": ACTIVATION, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "n_groups": 8, "n_routed_experts": 8,
        "norm_topk_prob": True, "num_experts_per_tok": 2, "rope_theta": 1e4, "routed_scaling_factor": 1.0,
        "ssm_state_size": 128, "topk_group": 1, "use_conv_bias": True,
    },
    aliases={
        "attention_head_dim": "head_dim",
        "layers_block_type": "layer_types",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_n_groups": "n_groups",
        "num_local_experts": "n_routed_experts",
    },
    only={"mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_hidden_act": ACTIVATION,
          "moe_latent_size": None, "n_shared_experts": 1, "use_bias": False},
    # what transformers does not read, initial values of weights, and fields of parts that no layer has
    unused=(
        *("chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "norm_eps", "num_logits_to_keep"),
        *("num_query_groups", "partial_rotary_factor", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps"),
        *("rope_theta", "sliding_window", "use_mamba_kernels", "time_step_floor", "time_step_max", "time_step_min"),
        *("time_step_rank", "intermediate_size", "moe_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "n_group", "n_routed_experts", "norm_topk_prob"),
        *("num_experts_per_tok", "routed_scaling_factor", "topk_group"),
    ),
)  # fmt: skip
FAMILIES = ("nemotron_h", "nemotron_h_moe")  # without and with experts
NORMS = Norms(before_ffn="input_layernorm")
SIGNS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
KINDS = {**dict.fromkeys(mamba2_fields.MAMBA, "mamba"), **dict.fromkeys(mamba2_fields.FULL, "attention")}


def kinds(f: Fields) -> list[str]:
    """Reads the kind of each layer: a value of SIGNS."""
    pattern = f.text("hybrid_override_pattern", "")
    types = f.raw("layer_types")
    types = [SIGNS.get(sign, sign) for sign in pattern] if pattern else types
    if not isinstance(types, list) or not 0 < len(types) <= limits.MAX_LAYERS:
        raise f.error("layer_types", types, f"a list of 1 to {limits.MAX_LAYERS} kinds of layers")
    found = [KINDS.get(kind, kind) if isinstance(kind, str) else "" for kind in types]
    count = f.integer("num_hidden_layers", low=0, high=limits.MAX_LAYERS)
    if unknown := [kind for kind in found if kind not in SIGNS.values()]:
        raise f.error("layer_types", unknown[0], f"one of {', '.join(SIGNS.values())}, for each layer")
    if count not in (0, len(found)):
        raise f.error("num_hidden_layers", count, f"{len(found)}, the number of kinds of layers")
    return found


def experts(f: Fields) -> MoeFfn:
    """Reads the experts of a layer."""
    names, shared = ("n_routed_experts", "moe_intermediate_size"), "moe_shared_expert_intermediate_size"
    return from_config.experts(
        f, *names, glm4moe.routing(f), ACTIVATION,
        correction_bias=True, gated=False, shared_size=f.integer(shared, high=limits.MAX_FFN),
    )  # fmt: skip


def mamba(f: Fields) -> Mamba2:
    """Reads the Mamba-2 mixer of a layer."""
    groups = f.integer("n_groups", high=limits.MAX_HEADS)
    return Mamba2(
        f.integer("mamba_num_heads", high=limits.MAX_HEADS),
        f.integer("mamba_head_dim", high=limits.MAX_HEAD_DIM),
        groups,
        f.integer("ssm_state_size", high=limits.MAX_HEAD_DIM),
        f.integer("conv_kernel", low=2, high=limits.MAX_CONV),
        f.flag("use_conv_bias"),
        norm_groups=groups,
        dt_limits=mamba2_fields.dt_limits(f),
    )


def config(f: Fields, outer: Fields) -> ModelSpec:
    found = kinds(f)
    n = from_config.sizes(f.but({"num_hidden_layers": len(found)}), "layer_norm_epsilon")
    made = {
        "attention": lambda: LayerSpec(from_config.attention(f, n, rope=None), None, NORMS),
        "mamba": lambda: LayerSpec(mamba(f), None, NORMS),
        "mlp": lambda: LayerSpec(None, dense(f.integer("intermediate_size", high=limits.MAX_FFN), f), NORMS),
        "moe": lambda: LayerSpec(None, experts(f), NORMS),
    }
    layers = {kind: made[kind]() for kind in dict.fromkeys(found)}
    return from_config.model(f, outer, n, [layers[kind] for kind in found], {}, family=FAMILIES["moe" in found])


def dense(size: int, f: Fields | None = None) -> DenseFfn:
    """The feed-forward of a layer. `f`: the config.json, with its biases."""
    return DenseFfn(size, ACTIVATION, f is not None and f.flag("mlp_bias"), gated=False)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata: layers with kv-heads have attention, those with a feed-forward have that alone."""
    n, f = header.sizes("attention.layer_norm_epsilon"), header.fields
    full = header.layers_with("attention.head_count_kv", n.num_layers)
    wide = header.layers_with("feed_forward_length", n.num_layers)
    attention = LayerSpec(replace(header.attention(n), rope=None), None, NORMS)
    if header.is_mixture():
        shared = f.integer("expert_shared_feed_forward_length", high=limits.MAX_FFN)
        ffn = header.experts(Routing(used=2, scores="sigmoid"))
        ffn = replace(ffn, activation=ACTIVATION, gated=False, shared_size=shared)
    else:
        ffn = dense(header.ffn_size())
    other, mixer = LayerSpec(None, ffn, NORMS), LayerSpec(mamba2_fields.from_gguf(header), None, NORMS)
    layers = [attention if a else other if b else mixer for a, b in zip(full, wide, strict=True)]
    return header.model(n, layers, {}, family=FAMILIES[header.is_mixture()])


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError for a model that GGUF cannot describe."""
    from ckdist.models import to_gguf

    widths = [mixer.head_dim for mixer in spec.mixers(Attention)]
    names = ("expert_shared_feed_forward_length", *family.GROUPED_EXPERTS[1:])
    more = {
        **mamba2_fields.metadata(spec, where),
        **(to_gguf.experts(spec, where, names) if spec.mixtures() else {}),
        "feed_forward_length": [layer.ffn.intermediate_size if layer.ffn else 0 for layer in spec.layers],
        "attention.layer_norm_epsilon": float(spec.norm_eps),
        "rope.dimension_count": widths[0] if widths else 0,
        "rope.scaling.finetuned": False,
    }
    return to_gguf.dense(spec.family, spec, where, more)


MIXER = {
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mamba.{name}" for name in ("A_log", "D", "dt_bias", "norm", "out_proj")},
    "in_proj": mamba2_fields.IN_PROJ,
    "conv1d": mamba2_fields.CONV1D,
    **family.renamed("{}_proj", "mlp.{}_proj"),
    **family.renamed("experts.{}_proj", "mlp.experts.{}_proj"),
    **family.renamed("shared_experts.{}_proj", "mlp.shared_expert.{}_proj"),
    "gate": "mlp.gate",
    "gate.e_score_correction.bias": "mlp.gate.e_score_correction.bias",
}
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but(
        {
            name: target
            for root in ("model", "backbone")
            for name, target in {
                f"{root}.embeddings": "model.embed_tokens",
                f"{root}.norm_f": "model.norm",
                **in_layers(f"{root}.layers", {f"mixer.{name}": target for name, target in MIXER.items()}),
                **in_layers(f"{root}.layers", {"norm": "input_layernorm"}),
            }.items()
        }
    ),
    gguf_names=family.GGUF_EXPERTS.but_in_layers(mamba2_fields.GGUF, mamba2_fields.GGUF_FORM),
    gguf_values=mamba2_fields.gguf_values,
)
