"""A.X K1: DeepSeek-V3 with a norm after experts. Files have one for dense layers too, which is not used."""

from dataclasses import replace

from ckdist.models.config_keys import sizes
from ckdist.models.families import deepseek_v2, deepseek_v3, family
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import ModelSpec, MoeFfn, Norms

GROUPED = "noaux_tc"
KEYS = deepseek_v3.KEYS.but(
    defaults={
        **sizes(hidden=7168, ffn=18432, layers=61, heads=64, positions=32768, vocab=163840),
        "first_k_dense_replace": 1, "moe_intermediate_size": 2048, "n_routed_experts": 192,
    },
    nulls={"num_key_value_heads": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. Groups of experts are always chosen; files of another topk_method have no correction."""
    corrected = f.text("topk_method") == GROUPED
    spec = deepseek_v2.model(f.but({"topk_method": GROUPED}), outer)
    layers = [
        replace(one, ffn=replace(one.ffn, correction_bias=corrected), norms=Norms(after_ffn="post_mlp_layernorm"))
        if isinstance(one.ffn, MoeFfn)
        else one
        for one in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


FAMILY = replace(
    deepseek_v3.FAMILY,
    keys=KEYS,
    gguf="",
    from_config=config,
    to_gguf=GgufWriter(refused="its readers have no norm after experts"),
    safetensors=deepseek_v2.SAFETENSORS.but_in_layers({"mlp.post_mlp_layernorm": "post_mlp_layernorm"}),
    ignored=(*family.ROTATIONS, r"model\.layers\.\d+\.(mlp\.)?post_mlp_layernorm\.weight"),
)
