"""A.X K1: DeepSeek-V3 with a norm after experts. Files have one for dense layers too, which is not used."""

from dataclasses import replace

from ckdist.models.families import deepseek_v2, deepseek_v3, family, glm4_moe_lite
from ckdist.models.families.family import Fields, GgufWriter, in_layers
from ckdist.models.spec import ModelSpec, MoeFfn, Norms

NAME, GROUPED = "axk1", "noaux_tc"
KEYS = deepseek_v3.KEYS.but(
    defaults={
        "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 32768,
        "moe_intermediate_size": 2048, "n_routed_experts": 192, "num_attention_heads": 64, "num_hidden_layers": 61,
        "vocab_size": 163840,
    },
    nulls={"num_key_value_heads": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. Groups of experts are always chosen; files of another topk_method have no correction."""
    whole = f.but({"topk_method": GROUPED})
    corrected, dense = f.text("topk_method") == GROUPED, glm4_moe_lite.dense_layers(f)
    spec = deepseek_v2.model(NAME, whole, outer, deepseek_v3.ROUTING, dense)
    for name in whole.values.keys() - {one for _, one in whole.unread()}:
        f.raw(name)
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
    safetensors=deepseek_v3.FAMILY.safetensors.but(
        in_layers("model.layers", {"mlp.post_mlp_layernorm": "post_mlp_layernorm"})
    ),
    ignored=(*family.ROTATIONS, r"model\.layers\.\d+\.(mlp\.)?post_mlp_layernorm\.weight"),
)
