"""BART (Lewis et al. 2019, arXiv:1910.13461): an encoder and a decoder with a norm after each part."""

from dataclasses import dataclass, replace

from ckdist.errors import ModelFileError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import bert
from ckdist.models.families.family import Family, Fields, TensorNames, in_layers
from ckdist.models.spec import Attention, CrossAttention, DenseFfn, LayerSpec, ModelSpec, Norms

KEYS = ConfigKeys(
    {
        "activation_function": "gelu", "bos_token_id": 0, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
        "decoder_layers": 12, "decoder_start_token_id": 2, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
        "encoder_layers": 12, "max_position_embeddings": 1024, "tie_word_embeddings": True, "vocab_size": 50265,
    },
    aliases={"hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads"},
    only={"normalize_embedding": True, "static_position_embeddings": False},
    # encoder_layers; the tensor's rows; the tensor is there or not
    unused=("num_hidden_layers", "extra_pos_embeddings", "add_bias_logits"),
)  # fmt: skip
OFFSET = 2  # rows before that of the first position
FUNCTIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh"}
BEHIND = Norms(replaces_stream=(True, True))
FIRST = Norms(before_mixer=None, replaces_stream=(False, True))  # for a first layer if embeddings have no norm


@dataclass(frozen=True)
class Stack:
    """The encoder's or the decoder's layers. `name` is the prefix of its fields; `crosses`: it has cross-attention."""

    name: str
    crosses: bool

    def layers(self, f: Fields, hidden: int, norm_first: bool) -> tuple[LayerSpec, ...]:
        """Reads the layers from a config.json. `norm_first`: embeddings have a norm. Raises ModelFileError."""
        heads = f.integer(f"{self.name}_attention_heads", high=limits.MAX_HEADS)
        if hidden % heads:
            raise f.error("d_model", hidden, f"divisible by {self.name}_attention_heads ({heads})")
        width = hidden // heads
        across = Attention(heads, heads, width, width**-0.5, rope=None, qkv_bias=True, o_bias=True)
        attention = replace(across, bidirectional=not self.crosses)
        cross = CrossAttention(across, replaces_stream=True)
        function = from_config.activation(f, "activation_function", FUNCTIONS)
        size = f.integer(f"{self.name}_ffn_dim", high=limits.MAX_FFN)
        ffn = DenseFfn(size, function, bias=True, gated=False)
        count = f.integer(f"{self.name}_layers", high=limits.MAX_LAYERS)
        return tuple(
            LayerSpec(attention, ffn, BEHIND if i or norm_first else FIRST, cross=cross if self.crosses else None)
            for i in range(count)
        )


def config(f: Fields, outer: Fields) -> ModelSpec:
    return model(f, outer, norm_first=True)


def model(f: Fields, outer: Fields, norm_first: bool, **positions: object) -> ModelSpec:
    """Reads a config.json. `positions` are fields of a ModelSpec; without them positions are learned embeddings.

    Raises ModelFileError for a model with norms before the parts.
    """
    if f.flag("normalize_before") or f.flag("add_final_layer_norm"):
        raise ModelFileError(f"{f.where}: normalize_before is true; of this family norms behind each part are read")
    vocab, hidden = f.integer("vocab_size", high=limits.MAX_VOCAB), f.integer("d_model", high=limits.MAX_WIDTH)
    longest = f.integer("max_position_embeddings", high=limits.MAX_POSITION)
    positions = positions or {"positions": longest + OFFSET, "first_position": OFFSET}
    common = {"embedding_scale": hidden**0.5 if f.flag("scale_embedding") else 1.0, "norm": "layer_bias", **positions}
    of = lambda stack: stack.layers(f, hidden, norm_first)
    ropes = common.pop("ropes", {})
    sizes = lambda layers: ("", vocab, hidden, layers, ropes, 1e-5, longest)
    encoder = ModelSpec(*sizes(of(Stack("encoder", False))), root="encoder", **common)
    starts = [f.integer("decoder_start_token_id", low=0, high=vocab - 1)]
    older = f.flag("force_bos_token_to_be_generated")  # older files have this in place of forced_bos_token_id
    first = "bos_token_id" if older and not f.has("forced_bos_token_id") else "forced_bos_token_id"
    if f.has(first):
        starts.append(f.integer(first, low=0, high=vocab - 1))
    return ModelSpec(
        *sizes(of(Stack("decoder", True))), from_config.tied(f, outer), **common,
        encoder=encoder, start_tokens=tuple(starts), banned_tokens=_banned(f, vocab), output_bias=True,
    )  # fmt: skip


def _banned(f: Fields, vocab: int) -> tuple[int, ...]:
    """The single tokens that `bad_words_ids` bans. Raises ModelFileError if it is not a list of lists of tokens."""
    words = f.raw("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise f.error("bad_words_ids", words, "a list of lists of token ids")
    single = [f.but({"bad_words_ids": word[0]}) for word in words if len(word) == 1]
    return tuple(sorted({one.integer("bad_words_ids", low=0, high=vocab - 1) for one in single}))


def _attention(part: str, path: str) -> dict[str, str]:
    """Names of the matrices of an attention."""
    return {f"{part}.{own}_proj": f"{path}.{own[0]}_proj" for own in ("q", "k", "v", "out")}


COMMON = {**_attention("self_attn", "self_attn"), "fc1": "mlp.up_proj", "fc2": "mlp.down_proj"}
ENCODER = {
    "encoder.embed_positions": "encoder.embed_positions",
    "encoder.layernorm_embedding": "encoder.layers.0.input_layernorm",
    **in_layers("encoder.layers", {**COMMON, "self_attn_layer_norm": "post_attention_layernorm"}, "encoder.layers.{}"),
    "encoder.layers.{}.final_layer_norm": "encoder.layers.{next}.input_layernorm",
}
DECODER = {
    **COMMON,
    **_attention("encoder_attn", "cross_attn"),
    "self_attn_layer_norm": "cross_attention_layernorm",
    "encoder_attn_layer_norm": "post_attention_layernorm",
}
NAMES = TensorNames(
    {
        "shared": "model.embed_tokens",
        "decoder.embed_positions": "model.embed_positions",
        "decoder.layernorm_embedding": "model.layers.0.input_layernorm",
        "lm_head": "lm_head",
        "final_logits_bias": "lm_head.bias",
        **in_layers("decoder.layers", DECODER),
        "decoder.layers.{}.final_layer_norm": "model.layers.{next}.input_layernorm",
        **ENCODER,
    },
    outer="model.",
)
COPIES = (r"(model\.)?(en|de)coder\.embed_tokens\.weight",)  # copies of the shared embeddings
FAMILY = Family(
    keys=KEYS, from_config=config, to_gguf=bert.FAMILY.to_gguf, safetensors=NAMES, gguf_names=NAMES, ignored=COPIES
)
