"""DeepSeek-V2 and V2-Lite: latent attention, a router with softmax; and every GGUF file of architecture deepseek2."""

import math
from dataclasses import replace

from ckdist.errors import ModelFileError
from ckdist.models import from_config, from_gguf, limits, rope
from ckdist.models.families import family
from ckdist.models.families.family import Family, GgufForm, GgufHeader, TensorNames
from ckdist.models.fields import Fields
from ckdist.models.from_config import ConfigDefaults, Sizes
from ckdist.models.spec import DenseFfn, LatentAttention, LayerSpec, ModelSpec, RopeSpec

NAME, GGUF = "deepseek_v2", "deepseek2"
KV_B = ("self_attn.k_b_proj", "self_attn.v_b_proj")
NORM_EPS = 1e-6  # of both low ranks, whatever config.json says of the others


def latent_attention(f: Fields, n: Sizes, rotation: RopeSpec, q_rank: int) -> LatentAttention:
    """The attention of config.json. The scale has YaRN's magnitude twice, of queries and of keys."""
    if f.flag("attention_bias"):
        raise f.error("attention_bias", True, "false: latent attention with biases is not supported")
    width = lambda name, absent: f.integer(name, absent, high=limits.MAX_HEAD_DIM)
    nope, rotated = width("qk_nope_head_dim", 128), width("qk_rope_head_dim", 64)
    scaling = Fields(rotation.scaling, f.where)
    scale = (nope + rotated) ** -0.5
    if (all_dims := scaling.number("mscale_all_dim", 0.0, low=-1.0)) and scaling.has("factor"):
        scale *= rope.yarn_magnitude(scaling.number("factor"), all_dims) ** 2
    return LatentAttention(
        n.num_heads,
        f.integer("kv_lora_rank", 512, high=limits.MAX_LATENT),
        nope,
        rotated,
        width("v_head_dim", 128),
        scale,
        q_rank,
        norm_eps=NORM_EPS,
    )


def model(family_name: str, f: Fields, outer: Fields, defaults: ConfigDefaults, q_rank: int) -> ModelSpec:
    """From config.json; `q_rank`: of queries, where it is absent."""
    rotated = f.integer("qk_rope_head_dim", 64, high=limits.MAX_HEAD_DIM)
    n = replace(from_config.sizes(Fields({**f.values, "head_dim": rotated}, f.where, f.prefix), defaults))
    ropes = from_config.rotations(f, n, interleaved=f.flag("rope_interleave", True))
    low_rank = 0 if "q_lora_rank" in f.values and not f.has("q_lora_rank") else f.integer("q_lora_rank", q_rank)
    attention = latent_attention(f, n, ropes["global"], low_rank)
    dense = f.integer("first_k_dense_replace", 0, low=0)
    if dense < n.num_layers:
        raise f.error("first_k_dense_replace", dense, f"{n.num_layers}: mixtures of experts are not supported")
    ffn = DenseFfn(n.intermediate_size, from_config.activation(f))
    return n.model(family_name, [LayerSpec(attention, ffn)] * n.num_layers, ropes, from_config.tied(f, outer))


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    return model(NAME, f, outer, ConfigDefaults(max_position=2048), 1536)


def gguf(header: GgufHeader) -> ModelSpec:
    """From GGUF metadata, of files with attn_kv_b as well as with attn_k_b and attn_v_b."""
    f = header.fields
    rank = f.integer("attention.kv_lora_rank", high=limits.MAX_LATENT)
    rotated = f.integer("rope.dimension_count", 64, high=limits.MAX_HEAD_DIM)
    # Older files have the widths of heads where newer ones have those of what is cached.
    old = not f.has("attention.key_length_mla")
    key = f.integer("attention.key_length" if old else "attention.key_length_mla", high=limits.MAX_HEAD_DIM)
    value = f.integer("attention.value_length" if old else "attention.value_length_mla", high=limits.MAX_HEAD_DIM)
    if key <= rotated:
        raise f.error("attention.key_length", key, f"above rope.dimension_count, which is {rotated}")
    own = {**f.values, "attention.key_length": rotated, "attention.value_length": rotated}
    n = from_gguf.sizes(replace(header, fields=Fields(own, f.where, f.prefix)))
    rotation = from_gguf.rotation(replace(header, fields=Fields(own, f.where, f.prefix)), n, interleaved=True)
    scale = key**-0.5
    if (log_multiplier := f.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0)) and f.has("rope.scaling.factor"):
        scale *= (1 + log_multiplier * math.log(f.number("rope.scaling.factor"))) ** 2
        rotation = replace(rotation, magnitude=1.0)
    low_rank = 0 if from_gguf.has(header, "attn_q.weight") else f.integer("attention.q_lora_rank")
    attention = LatentAttention(n.num_heads, rank, key - rotated, rotated, value, scale, low_rank)
    dense = f.integer("leading_dense_block_count", n.num_layers, low=0)
    if dense < n.num_layers:
        raise ModelFileError(f"{f.where}: mixtures of experts are not supported")
    layers = [LayerSpec(attention, DenseFfn(n.intermediate_size))] * n.num_layers
    return n.model(NAME, layers, {"global": rotation}, from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """As GGUF metadata."""
    a, r, n = spec.layers[0].mixer, spec.ropes["global"], len(spec.layers)
    assert isinstance(a, LatentAttention)
    values = {
        "block_count": n,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.layers[0].ffn.intermediate_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": a.kv_lora_rank,
        "attention.key_length": a.key_width,
        "attention.value_length": a.kv_lora_rank,
        "attention.key_length_mla": a.head_dim,
        "attention.value_length_mla": a.v_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.freq_base": float(r.theta),
        "rope.dimension_count": a.rope_dim,
        "vocab_size": spec.vocab_size,
        "leading_dense_block_count": n,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_shared_count": 0,
        "expert_feed_forward_length": 0,
        "expert_weights_scale": 1.0,
    }
    if a.q_lora_rank:
        values["attention.q_lora_rank"] = a.q_lora_rank
    return GgufForm({"general.architecture": GGUF, **{f"{GGUF}.{name}": value for name, value in values.items()}})


SAFETENSORS = replace(family.SAFETENSORS, layer={"self_attn.kv_b_proj": KV_B}, kv_b="kv_b_proj")
GGUF_NAMES = TensorNames(
    top=family.GGUF.top,
    layer={
        **family.GGUF.layer,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": KV_B,
        "attn_k_b": KV_B[0],
        "attn_v_b": KV_B[1],
    },
    prefix="blk",
    own_names=False,
    kv_b="attn_kv_b",
)

FAMILY = Family(
    name=NAME,
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    gguf=GGUF,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=SAFETENSORS,
    gguf_names=GGUF_NAMES,
    ignored=family.ROTATIONS,
)
