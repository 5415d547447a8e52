"""Nomic Embed (Nussbaum et al. 2024, arXiv:2402.01613): BERT with rotated positions and gated feed-forwards."""

from dataclasses import replace

from ckdist.models import from_config, from_gguf
from ckdist.models.families import bert
from ckdist.models.families.family import Family, GgufHeader, TensorNames
from ckdist.models.fields import Fields
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec

NAME = "nomic_bert"
# What the model's own code calls fields, and what transformers does.
RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
ABSENT = {  # what the forward does not do, and the values that say so
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_interleaved": False,
}


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json. ModelFileError for what the forward does not do."""
    del outer  # encoders of text alone
    for name, value in ABSENT.items():
        if f.flag(name, value) != value:
            raise f.error(name, f.values[name], str(value).lower())
    if f.text("activation_function", "swiglu") != "swiglu" or f.text("hidden_act", "silu") != "silu":
        raise f.error("activation_function", f.values.get("activation_function", f.values.get("hidden_act")), "swiglu")
    values = {RENAMED.get(name, name): value for name, value in f.values.items()}
    trained = f.integer("max_trained_positions", 2048)  # further ones need another rotation for each length
    values["max_position_embeddings"] = min(values.get("max_position_embeddings") or trained, trained)
    f = Fields(values, f.where, f.prefix)
    n = from_config.sizes(f, from_config.ConfigDefaults(max_position=trained))
    attention = Attention(n.num_heads, n.num_heads, n.head_dim, n.head_dim**-0.5, bidirectional=True)
    layers = (LayerSpec(attention, DenseFfn(n.intermediate_size), bert.NORMS),) * n.num_layers
    return ModelSpec(
        NAME, n.vocab_size, n.hidden_size, layers, from_config.rotations(f, n, 1000.0),
        f.number("layer_norm_eps", 1e-12, high=1.0), n.max_position, norm="layer_bias",
        token_types=f.integer("type_vocab_size", 2, low=0),
    )  # fmt: skip


def from_gguf_header(header: GgufHeader) -> ModelSpec:
    """From a GGUF file."""
    n = bert.gguf_sizes(header)
    attention = Attention(n.num_heads, n.num_heads, n.head_dim, n.head_dim**-0.5, bidirectional=True)
    layers = (LayerSpec(attention, DenseFfn(n.intermediate_size), bert.NORMS),) * n.num_layers
    ropes = {"global": from_gguf.rotation(header, n, 1000.0)}
    return n.model(
        NAME, layers, ropes, False, norm="layer_bias", token_types=bert.rows(header, "token_types")
    )  # fmt: skip


PROJECTIONS = tuple(f"self_attn.{part}_proj" for part in "qkv")
KEPT = (*PROJECTIONS, "self_attn.o_proj", "post_attention_layernorm", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
NAMES = TensorNames(  # those of the model's own code, and those of transformers
    top={
        "embeddings.word_embeddings": "model.embed_tokens",
        "embeddings.token_type_embeddings": "model.embed_types",
        "emb_ln": "model.layers.0.input_layernorm",
        "embeddings.LayerNorm": "model.layers.0.input_layernorm",
    },
    layer={
        "attn.Wqkv": PROJECTIONS,
        "attn.out_proj": "self_attn.o_proj",
        "norm1": "post_attention_layernorm",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        **{part: part for part in KEPT},
    },
    prefix="encoder.layers",
    other_prefix="layers",
    own_names=False,
    next_layer={"norm2": "input_layernorm", "post_mlp_layernorm": "input_layernorm"},
    outer="bert.",
)
GGUF_NAMES = replace(bert.GGUF_NAMES, layer={**bert.GGUF_NAMES.layer, "attn_qkv": PROJECTIONS})
FAMILY = Family(
    name=NAME,
    architectures=("NomicBertModel",),
    model_types=(NAME,),
    gguf="nomic-bert",
    from_config=config,
    from_gguf=from_gguf_header,
    to_gguf=bert.export,
    safetensors=NAMES,
    gguf_names=GGUF_NAMES,
    ignored=bert.IGNORED,
)
