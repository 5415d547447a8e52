"""Nomic Embed (Nussbaum et al. 2024, arXiv:2402.01613): BERT with rotary positions and gated feed-forwards."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import bert
from ckdist.models.families.family import Family, Fields, GgufHeader, TensorNames, in_layers
from ckdist.models.from_config import Sizes
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec, RopeSpec

KEYS = ConfigKeys(
    {
        "activation_function": "swiglu", "hidden_act": "silu", "layer_norm_eps": 1e-12, "max_position_embeddings": 2048,
        "max_trained_positions": 2048, "partial_rotary_factor": 1.0, "rope_theta": 1000.0, "type_vocab_size": 2,
    },
    aliases={  # the names of the model's own code
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
        "rotary_emb_fraction": "partial_rotary_factor",
    },
    only={
        "activation_function": "swiglu", "causal": False, "hidden_act": "silu", "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "num_experts": 0, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
        "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "use_rms_norm": False,
    },
    unused=("parallel_block_tied_norm", "tie_word_embeddings"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    del outer  # there are no multimodal encoders
    n = from_config.sizes(f, "layer_norm_eps")
    # for longer texts, the model's own code uses a different rotation for each length
    trained = f.integer("max_trained_positions")
    longest = min(n.max_position, trained, f.integer("n_positions", trained, high=limits.MAX_POSITION))
    ropes, types = from_config.rotations(f, n, from_config.part(f)), f.integer("type_vocab_size", low=0)
    return model(replace(n, max_position=longest), from_config.dense(f, "silu"), ropes, types)


def model(n: Sizes, ffn: DenseFfn, ropes: dict[str, RopeSpec], token_types: int) -> ModelSpec:
    """Makes a model."""
    layers = [LayerSpec(n.attention(bidirectional=True), ffn, bert.NORMS)] * n.num_layers
    return n.model(layers, ropes, False, norm="layer_bias", token_types=token_types)


def from_gguf_header(header: GgufHeader) -> ModelSpec:
    """Reads a GGUF file."""
    n = bert.gguf_sizes(header)
    return model(n, header.dense(), {"global": header.rotation(n, 1000.0)}, header.rows("token_types"))


PROJECTIONS = tuple(f"self_attn.{part}_proj" for part in "qkv")
KEPT = (*PROJECTIONS, "self_attn.o_proj", "post_attention_layernorm", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
LAYER = {
    "attn.Wqkv": PROJECTIONS,
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
    **{part: part for part in KEPT},
}
END = {"norm2": "input_layernorm", "post_mlp_layernorm": "input_layernorm"}
NAMES = TensorNames(
    {
        "embeddings.word_embeddings": "model.embed_tokens",
        "embeddings.token_type_embeddings": "model.embed_types",
        "emb_ln": "model.layers.0.input_layernorm",
        "embeddings.LayerNorm": "model.layers.0.input_layernorm",
        # the names of transformers, then those of the model's own code
        **in_layers("layers", LAYER),
        **in_layers("encoder.layers", LAYER),
        **in_layers("layers", END, "model.layers.{next}"),
        **in_layers("encoder.layers", END, "model.layers.{next}"),
    },
    outer="bert.",
)
GGUF_NAMES = bert.GGUF_NAMES.but_in_layers({"attn_qkv": PROJECTIONS})
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=from_gguf_header,
    to_gguf=bert.FAMILY.to_gguf,
    safetensors=NAMES,
    gguf_names=GGUF_NAMES,
    ignored=bert.IGNORED,
)
