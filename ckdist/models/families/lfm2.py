"""LFM2: gated short convolutions in most layers, attention with norms of heads in the others."""

from collections.abc import Sequence

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter, Target
from ckdist.models.from_config import Sizes
from ckdist.models.spec import DenseFfn, Ffn, LayerSpec, ModelSpec
from ckdist.models.state_mixers import GatedConv

KEYS = ConfigKeys(
    {
        **sizes(hidden=2560, ffn=12288, layers=32, heads=32, kv_heads=8, positions=128000, vocab=65536),
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
        "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    only={"block_use_swiglu": True, "use_pos_enc": True},
    unused=(  # transformers does not read them either
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    ),
)  # fmt: skip
CONV, FULL = "conv", "full_attention"


def feed_forward(f: Fields) -> DenseFfn:
    """Reads the feed-forward, whose size may be 2/3 of the file's, rounded up."""
    size = f.integer("intermediate_size", high=limits.MAX_FFN)
    if f.flag("block_auto_adjust_ff_dim"):
        size = int(f.number("block_ffn_dim_multiplier", high=1e3) * int(2 * size / 3))
        multiple = f.integer("block_multiple_of", high=limits.MAX_FFN)
        size = -(-size // multiple) * multiple
    return DenseFfn(size)


def layers(f: Fields, n: Sizes, ffns: Sequence[Ffn]) -> list[LayerSpec]:
    """Reads the layers, whose kinds stand in `layer_types`, or in `full_attn_idxs` of older files."""
    kernel = f.integer("conv_L_cache", low=2, high=limits.MAX_CONV)
    mixers = {FULL: n.attention(qk_norm="head"), CONV: GatedConv(n.hidden_size, kernel, f.flag("conv_bias"))}
    types, count = f.raw("layer_types"), n.num_layers
    full = f.raw("full_attn_idxs")
    if types is None and isinstance(full, list) and all(type(i) is int and 0 <= i < count for i in full):
        types = [FULL if i in full else CONV for i in range(count)]
    if not isinstance(types, list) or len(types) != count or any(kind not in (FULL, CONV) for kind in types):
        raise f.error("layer_types", types, f"a list of {count} of {FULL} and {CONV}, or full_attn_idxs in its place")
    return [LayerSpec(mixers[kind], ffn) for kind, ffn in zip(types, ffns, strict=True)]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f, "norm_eps")
    return from_config.model(f, outer, n, layers(f, n, [feed_forward(f)] * n.num_layers))


def gguf_model(header: GgufHeader, n: Sizes, ffns: Sequence[Ffn]) -> ModelSpec:
    """Reads GGUF metadata. Layers without kv-heads have a convolution."""
    conv = GatedConv(n.hidden_size, header.fields.integer("shortconv.l_cache", low=2, high=limits.MAX_CONV))
    full = header.layers_with("attention.head_count_kv", n.num_layers)
    mixers = [n.attention(qk_norm="head") if is_full else conv for is_full in full]
    made = [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return header.model(n, made, {"global": header.rotation(n, 1e6)})


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    return gguf_model(header, n, [header.dense()] * n.num_layers)


def hybrid_metadata(spec: ModelSpec, where: str) -> dict[str, object]:
    """The GGUF metadata of the mixers. Raises ArchitectureError for biases."""
    conv = next(iter(spec.mixers(GatedConv)), GatedConv(0))
    if conv.bias:
        raise ArchitectureError(f"{where}: {spec.family} with conv_bias true has no GGUF form: its readers have none")
    return {"attention.head_count_kv": spec.kv_heads, "shortconv.l_cache": conv.conv_kernel}


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF: a convolution's row per channel."""
    return values.reshape(spec.hidden_size, -1) if weight.endswith(".conv.conv.weight") else values


IN_PROJ = ("conv.in_proj_b", "conv.in_proj_c", "conv.in_proj_x")
NAMES = {
    "conv.in_proj": IN_PROJ,
    "ffn_norm": "post_attention_layernorm",
    "operator_norm": "input_layernorm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    **family.numbered("feed_forward", "mlp"),
}
GGUF_NAMES = {"shortconv.in_proj": IN_PROJ, "shortconv.conv": "conv.conv", "shortconv.out_proj": "conv.out_proj"}
GGUF_NORM: dict[str, Target] = {"output_norm": (), "token_embd_norm": "model.norm"}
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(hybrid_metadata),
    safetensors=family.SAFETENSORS.but({"model.embedding_norm": "model.norm"}).but_in_layers(NAMES),
    gguf_names=family.GGUF.but(GGUF_NORM).but_in_layers(GGUF_NAMES),
    gguf_values=gguf_values,
)
