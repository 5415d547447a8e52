"""Falcon-H1: attention and Mamba-2 of the same norm in every layer, with factors on most matrices.

GGUF files have these factors in their weights.
"""

from ckdist.models import from_config, limits, mamba2_fields
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import bamba, family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter, Target
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec
from ckdist.models.state_mixers import AttentionAndMamba

FACTORS = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
KEYS = ConfigKeys(
    {
        **sizes(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, positions=8192, vocab=128000),
        **mamba2_fields.DEFAULTS, **{f"{name}_multiplier": 1.0 for name in FACTORS}, "hidden_act": "silu",
        "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mlp_multipliers": [1.0, 1.0], "rms_norm_eps": 1e-5,
        "rope_theta": 1e5, "ssm_multipliers": [1.0] * 5,
    },
    nulls={"mamba_d_ssm": 0, "num_key_value_heads": None},
    only={"mamba_use_mlp": True, "projectors_bias": False},
    unused=("attn_layer_indices", "mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep", "mamba_expand"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    factor = {name: f.number(f"{name}_multiplier", low=-1e6, high=1e6) for name in FACTORS}
    gate, down = f.numbers("mlp_multipliers", 2, low=-1e6, high=1e6)
    norms = f.flag("mamba_rms_norm")
    if norms and f.flag("mamba_norm_before_gate"):
        raise f.error("mamba_norm_before_gate", True, "false: a norm before the gate is not supported")
    parts = [factor["ssm_in"] * one for one in f.numbers("ssm_multipliers", 5, low=-1e6, high=1e6)]
    mamba = mamba2_fields.read(f, n, norm_groups=f.integer("mamba_n_groups") if norms else 0, scales=tuple(parts))
    scale = n.head_dim**-0.5 * factor["attention_in"] ** 2 * factor["key"]
    mixer = AttentionAndMamba(
        n.attention(scale=scale), mamba, factor["attention_in"] * factor["attention_out"], factor["ssm_out"]
    )
    if mamba.bias:  # the factors of in_proj would apply to it as well
        raise f.error("mamba_proj_bias", True, "false: biases are not supported in this family")
    size = f.integer("intermediate_size", high=limits.MAX_FFN)
    ffn = DenseFfn(size, from_config.activation(f), gate_scale=gate, scale=down)
    layers = [LayerSpec(mixer, ffn, bamba.NORMS)] * n.num_layers
    scales = {"embedding_scale": factor["embedding"], "logit_scale": factor["lm_head"]}
    return from_config.model(f, outer, n, layers, **scales)


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    normed = header.has_any(".ssm_norm.weight")
    mamba = mamba2_fields.from_gguf(header, **({} if normed else {"norm_groups": 0}))
    layer = LayerSpec(AttentionAndMamba(header.attention(n), mamba), header.dense(), bamba.NORMS)
    return header.model(n, [layer] * n.num_layers)


# converters leave `.weight` out
FFN_NORM: dict[str, Target] = dict.fromkeys(("ffn_norm.weight", "ffn_norm"), "pre_ff_layernorm.weight")
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(refused="its factors are not in its weights"),
    safetensors=bamba.FAMILY.safetensors,
    gguf_names=family.GGUF.but_in_layers({**mamba2_fields.GGUF, **FFN_NORM}, mamba2_fields.GGUF_FORM),
    gguf_values=mamba2_fields.gguf_values,
)
