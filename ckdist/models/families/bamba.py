"""Bamba: Mamba-2 in most layers, attention with half-rotated heads in the others."""

from ckdist.models import from_config, mamba2_fields
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec, Norms

NORMS = Norms(before_ffn="pre_ff_layernorm")
KEYS = ConfigKeys(
    {
        **sizes(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, positions=262144, vocab=128000),
        **mamba2_fields.DEFAULTS, "hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    },
    nulls={"num_key_value_heads": None},
    unused=("attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, full = from_config.sizes(f), f.raw("attn_layer_indices") or []
    if not isinstance(full, list) or any(type(i) is not int or not 0 <= i < n.num_layers for i in full):
        raise f.error("attn_layer_indices", full, f"a list of numbers below {n.num_layers}")
    ffn = from_config.dense(f, bias=f.flag("mlp_bias"))
    mamba, attention = mamba2_fields.read(f, n), from_config.attention(f, n)
    layers = [LayerSpec(attention if i in full else mamba, ffn, NORMS) for i in range(n.num_layers)]
    return from_config.model(f, outer, n, layers, from_config.rotations(f, n, from_config.part(f)))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    to_gguf=GgufWriter(refused="its readers rotate other pairs of a half-rotated head"),
    safetensors=family.SAFETENSORS.but({"model.final_layernorm": "model.norm"}).but_in_layers(
        {**family.renamed("feed_forward.{}_proj", "mlp.{}_proj"), **mamba2_fields.SAFETENSORS}
    ),
    gguf_names=family.GGUF,
)  # fmt: skip
