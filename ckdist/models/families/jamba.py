"""Jamba: Mamba-1 in most layers, attention without rotation in the others; experts in every other layer."""

from ckdist.models import from_config, limits, mamba1_fields
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import bamba, family
from ckdist.models.families.family import Family, GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.models.state_mixers import Mamba1
from ckdist.program.routing import Routing

ROUTING = Routing(used=2, renormalise=False)
KEYS = ConfigKeys(
    {
        **sizes(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, positions=262144, vocab=65536),
        "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
        "hidden_act": "silu", "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": "auto",
        "mamba_expand": 2, "num_experts": 16, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,
        "router_aux_loss_coef": 0.001,
    },
    aliases={"num_local_experts": "num_experts"},
    nulls={"num_key_value_heads": None},
    only={"mamba_inner_layernorms": True, "sliding_window": None},
    unused=(  # how another program computes the same, and kinds of layers that other fields say
        *("calc_logits_for_entire_prompt", "num_logits_to_keep", "n_ctx", "use_mamba_kernels", "use_mambapy"),
        *("use_associative_scan", "layer_types", "layers_block_type", "layers_num_experts"),
    ),
)  # fmt: skip


def chosen(f: Fields, kind: str, count: int) -> list[bool]:
    """For each layer, True if it is of a kind: (layer - offset) is a multiple of the period."""
    period = f.integer(f"{kind}_layer_period", high=limits.MAX_LAYERS)
    offset = f.integer(f"{kind}_layer_offset", low=0, high=limits.MAX_LAYERS)
    if offset >= period:
        raise f.error(f"{kind}_layer_offset", offset, f"below {kind}_layer_period, {period}")
    return [i % period == offset for i in range(count)]


def config(f: Fields, outer: Fields) -> ModelSpec:
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
    dense, full = from_config.dense(f), n.attention(rope=None)
    layers = [
        LayerSpec(full if is_full else mamba, experts if experts and is_mixed else dense, bamba.NORMS)
        for is_full, is_mixed in zip(chosen(f, "attn", n.num_layers), chosen(f, "expert", n.num_layers), strict=True)
    ]
    return from_config.model(f, outer, n, layers, {}, **from_config.balance(f))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata: layers with kv-heads have attention, those with a router have experts."""
    n, mamba = header.sizes(), mamba1_fields.from_gguf(header, "weights")
    attention, ffn = n.attention(rope=None), lambda routed: header.experts(ROUTING) if routed else header.dense()
    layers = [
        LayerSpec(attention if is_full else mamba, ffn(f"blk.{i}.ffn_gate_inp.weight" in header.dims), bamba.NORMS)
        for i, is_full in enumerate(header.layers_with("attention.head_count_kv", n.num_layers))
    ]
    return header.model(n, layers, {})


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    moes = spec.mixtures()
    experts = {"expert_count": moes[0].num_experts, "expert_used_count": moes[0].routing.used} if moes else {}
    more = {**mamba1_fields.metadata(spec, where), "attention.head_count_kv": spec.kv_heads, **experts}
    return to_gguf.dense("jamba", spec, where, more)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS_EXPERTS.but({"model.final_layernorm": "model.norm"}).but_in_layers({
        "feed_forward.router": "mlp.gate",
        **family.stacked("feed_forward.experts"),
        **family.renamed("feed_forward.{}_proj", "mlp.{}_proj"),
        **family.renamed("feed_forward.experts.{}_proj", "mlp.experts.{}_proj"),
        **{f"mamba.{name}": target for name, target in mamba1_fields.TENSORS.items()},
    }),
    gguf_names=family.GGUF_EXPERTS.but_in_layers(
        {**mamba1_fields.GGUF, "ffn_norm": "pre_ff_layernorm"}, mamba1_fields.GGUF_FORM
    ),
    gguf_values=mamba1_fields.gguf_values,
)  # fmt: skip
