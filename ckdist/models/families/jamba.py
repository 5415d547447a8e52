"""Jamba: Mamba-1 in most layers, attention without rotation in the others; experts in every other layer."""

from ckdist.models import from_config, limits, mamba1_fields
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import bamba, family
from ckdist.models.families.family import Family, GgufForm, GgufHeader, in_layers
from ckdist.models.fields import Fields
from ckdist.models.spec import Attention, LayerSpec, ModelSpec, MoeFfn
from ckdist.models.state_mixers import Mamba1
from ckdist.program.routing import Routing

NAME = "jamba"
ROUTING = Routing(used=2, renormalise=False)
KEYS = ConfigKeys(
    {
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": "auto",
        "mamba_expand": 2,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "router_aux_loss_coef": 0.001,
        "vocab_size": 65536,
    },
    aliases={"num_local_experts": "num_experts"},
    nulls={"num_key_value_heads": None},
    only={"mamba_inner_layernorms": True, "sliding_window": None},
    unused=(  # how another program computes the same, and kinds of layers that other fields say
        *("calc_logits_for_entire_prompt", "num_logits_to_keep", "n_ctx", "use_mamba_kernels", "use_mambapy"),
        *("use_associative_scan", "layer_types", "layers_block_type", "layers_num_experts"),
    ),
)


def chosen(f: Fields, kind: str, count: int) -> list[bool]:
    """For each layer, True if it is of a kind: (layer - offset) is a multiple of the period."""
    period = f.integer(f"{kind}_layer_period", high=limits.MAX_LAYERS)
    offset = f.integer(f"{kind}_layer_offset", low=0, high=limits.MAX_LAYERS)
    if offset >= period:
        raise f.error(f"{kind}_layer_offset", offset, f"below {kind}_layer_period, {period}")
    return [i % period == offset for i in range(count)]


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    mamba = Mamba1(
        n.hidden_size * f.integer("mamba_expand", high=64),
        f.integer("mamba_d_state", high=limits.MAX_HEAD_DIM),
        mamba1_fields.dt_rank(f, "mamba_dt_rank", n.hidden_size),
        f.integer("mamba_d_conv", low=2, high=limits.MAX_CONV),
        f.flag("mamba_conv_bias"),
        f.flag("mamba_proj_bias"),
        "weights",
    )
    mixture = f.integer("num_experts", high=limits.MAX_EXPERTS) > 1
    experts = from_config.experts(f, "num_experts", "intermediate_size", ROUTING) if mixture else None
    mixers = [n.attention(rope=None) if full else mamba for full in chosen(f, "attn", n.num_layers)]
    dense, mixed = from_config.dense(f), chosen(f, "expert", n.num_layers)
    ffns = [experts if experts and is_mixed else dense for is_mixed in mixed]
    layers = [LayerSpec(mixer, ffn, bamba.NORMS) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return n.model(NAME, layers, {}, from_config.tied(f, outer), **from_config.balance(f))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata: layers with kv-heads have attention, those with a router have experts."""
    from ckdist.models import from_gguf

    n, mamba = from_gguf.sizes(header), mamba1_fields.from_gguf(header, "weights")
    full = from_gguf.layers_with(header.fields, "attention.head_count_kv", n.num_layers)
    mixers = [n.attention(rope=None) if is_full else mamba for is_full in full]
    routed = [f"blk.{i}.ffn_gate_inp.weight" in header.dims for i in range(n.num_layers)]
    ffns = [from_gguf.experts(header, ROUTING) if has_router else from_gguf.dense(header) for has_router in routed]
    layers = [LayerSpec(mixer, ffn, bamba.NORMS) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return n.model(NAME, layers, {}, from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    moe = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeFfn)), None)
    kv_heads = [layer.mixer.num_kv_heads if isinstance(layer.mixer, Attention) else 0 for layer in spec.layers]
    experts = {"expert_count": moe.num_experts, "expert_used_count": moe.routing.used} if moe else {}
    more = {**mamba1_fields.metadata(spec, where), "attention.head_count_kv": kv_heads, **experts}
    return to_gguf.dense(NAME, spec, where, more)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS_EXPERTS.but({
        "model.final_layernorm": "model.norm",
        **in_layers("model.layers", {
            "feed_forward.router": "mlp.gate",
            "feed_forward.experts.gate_up_proj": (family.GATE, family.UP),
            "feed_forward.experts.down_proj": family.DOWN,
            **family.renamed("feed_forward.{}_proj", "mlp.{}_proj"),
            **family.renamed("feed_forward.experts.{}_proj", "mlp.experts.{}_proj"),
            **{f"mamba.{name}": target for name, target in mamba1_fields.TENSORS.items()},
        }),
    }),
    gguf_names=family.GGUF_EXPERTS.but(
        in_layers("blk", {**mamba1_fields.GGUF, "ffn_norm": "pre_ff_layernorm"}), mamba1_fields.GGUF_FORM
    ),
    gguf_values=mamba1_fields.gguf_values,
)  # fmt: skip
