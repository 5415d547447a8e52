"""T5 (Raffel et al. 2020, arXiv:1910.10683), version 1.1, Flan-T5 and mT5; or the encoder only, as sentence-T5.

Relative biases on scores replace position embeddings. Queries are not scaled. Norms are rms norms.
"""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import bert
from ckdist.models.families.family import Family, Fields, GgufHeader, TensorNames, in_layers, renamed
from ckdist.models.spec import Attention, CrossAttention, DenseFfn, LayerSpec, ModelSpec, RelativeBias

DISTANCE = 128
KEYS = ConfigKeys(
    {
        "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0, "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6, "num_heads": 8, "num_layers": 6, "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32, "tie_word_embeddings": True, "vocab_size": 32128,
    },
    aliases={"head_dim": "d_kv", "hidden_size": "d_model", "num_attention_heads": "num_heads",
             "num_hidden_layers": "num_layers"},
    # feed_forward_proj has the first two; distances are not limited; an encoder has neither of the others
    unused=("dense_act_fn", "is_gated_act", "n_positions", "num_decoder_layers", "scale_decoder_outputs",
            "tie_word_embeddings"),
)  # fmt: skip
MAX_POSITION = 1 << 15  # most tokens of a sequence; the model itself has no limit
FUNCTIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}


def config(f: Fields, outer: Fields) -> ModelSpec:
    heads, width = f.integer("num_heads", high=limits.MAX_HEADS), f.integer("d_kv", high=limits.MAX_HEAD_DIM)
    buckets = f.integer("relative_attention_num_buckets", low=4, high=1 << 12)
    distance = f.integer("relative_attention_max_distance", low=buckets, high=1 << 16)
    attention = Attention(heads, heads, width, 1.0, rope=None, relative=RelativeBias(buckets, distance))
    ffn, count = _ffn(f), f.integer("num_layers", high=limits.MAX_LAYERS)
    vocab, hidden = f.integer("vocab_size", high=limits.MAX_VOCAB), f.integer("d_model", high=limits.MAX_WIDTH)
    encoder = _encoder(attention, ffn, count, vocab, hidden, f.number("layer_norm_epsilon", high=1.0))
    names = f.raw("architectures")
    if isinstance(names, list) and str(names[0]).endswith("EncoderModel"):
        return encoder
    layers = f.integer("num_decoder_layers", count, high=limits.MAX_LAYERS)
    start = f.integer("decoder_start_token_id", low=0, high=vocab - 1)
    return _whole(encoder, attention, layers, scales_outputs(f, outer), start)


def scales_outputs(f: Fields, outer: Fields) -> bool:
    """True if hidden states are divided by sqrt(hidden_size) before the output projection.

    If so, the embeddings are the output projection. Versions from 1.1 on have a separate one. For them, transformers 5
    writes `scale_decoder_outputs` in place of `tie_word_embeddings`.
    """
    return f.flag("scale_decoder_outputs", from_config.tied(f, outer))


def from_gguf_header(header: GgufHeader) -> ModelSpec:
    """Reads a GGUF file, which lacks the activation function and the largest distance of the biases.

    As in llama.cpp, the function is that of version 1.1 if the feed-forward is gated. The largest distance is 128.
    """
    f, n = header.fields, header.sizes()
    buckets = f.integer("attention.relative_buckets_count", 32, low=4, high=DISTANCE)
    bias = RelativeBias(buckets, DISTANCE)
    attention = Attention(n.num_heads, n.num_heads, n.head_dim, 1.0, rope=None, relative=bias)
    gated = "enc.blk.0.ffn_gate.weight" in header.dims
    ffn = DenseFfn(header.ffn_size(), "gelu_tanh" if gated else "relu", gated=gated)
    encoder = _encoder(attention, ffn, n.num_layers, n.vocab_size, n.hidden_size, n.norm_eps)
    layers = f.integer("decoder_block_count", n.num_layers, high=limits.MAX_LAYERS)
    start = f.integer("decoder_start_token_id", 0, low=0, high=n.vocab_size - 1)
    return _whole(encoder, attention, layers, "output.weight" not in header.dims, start)


def _encoder(attention: Attention, ffn: DenseFfn, layers: int, vocab: int, hidden: int, eps: float) -> ModelSpec:
    encodes = LayerSpec(replace(attention, bidirectional=True), ffn)
    return ModelSpec("", vocab, hidden, (encodes,) * layers, {}, eps, MAX_POSITION, root="encoder")


def _whole(encoder: ModelSpec, attention: Attention, layers: int, tied: bool, start: int) -> ModelSpec:
    """Adds a decoder of `layers` layers, which begins with the token `start`, to an encoder."""
    cross = CrossAttention(replace(attention, relative=None))
    layer, hidden = LayerSpec(attention, encoder.layers[0].ffn, cross=cross), encoder.hidden_size
    return ModelSpec(
        "", encoder.vocab_size, hidden, (layer,) * layers, {}, encoder.norm_eps, MAX_POSITION, tied,
        logit_scale=hidden**-0.5 if tied else 1.0, encoder=encoder, start_tokens=(start,),
    )  # fmt: skip


def _ffn(f: Fields) -> DenseFfn:
    """Reads the feed-forward; its name includes whether it is gated. Raises ModelFileError for an unknown function."""
    given = f.text("feed_forward_proj")
    gated, name = given.startswith("gated-"), given.removeprefix("gated-")
    name = "gelu_new" if given == "gated-gelu" else name
    if name not in FUNCTIONS:
        raise f.error("feed_forward_proj", given, f"gated- or not, and one of {', '.join(FUNCTIONS)}")
    return DenseFfn(f.integer("d_ff", high=limits.MAX_FFN), FUNCTIONS[name], gated=gated)


def _attention(part: str, path: str) -> dict[str, str]:
    """Names of the matrices of an attention."""
    return {f"{part}.{own}": f"{path}.{own}_proj" for own in "qkvo"}


def _feed_forward(number: int) -> dict[str, str]:
    """Names of the matrices of a feed-forward, which is part `number` of a layer."""
    stem, own = f"layer.{number}.DenseReluDense", {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
    return {f"{stem}.{name}": f"mlp.{part}_proj" for name, part in own.items()}


SELF = {
    **_attention("layer.0.SelfAttention", "self_attn"),
    "layer.0.SelfAttention.relative_attention_bias": "self_attn.relative_bias",
    "layer.0.layer_norm": "input_layernorm",
}
DECODER = {
    **SELF,
    **_attention("layer.1.EncDecAttention", "cross_attn"),
    "layer.1.layer_norm": "cross_attention_layernorm",
    **_feed_forward(2),
    "layer.2.layer_norm": "post_attention_layernorm",
}
ENCODER = {**SELF, **_feed_forward(1), "layer.1.layer_norm": "post_attention_layernorm"}
NAMES = TensorNames({
    "shared": "model.embed_tokens",
    "decoder.final_layer_norm": "model.norm",
    "lm_head": "lm_head",
    **in_layers("decoder.block", DECODER),
    "encoder.final_layer_norm": "encoder.norm",
    **in_layers("encoder.block", ENCODER, "encoder.layers.{}"),
})  # fmt: skip
GGUF_SELF = {
    **{f"attn_{own}": f"self_attn.{own}_proj" for own in "qkvo"},
    "attn_rel_b": "self_attn.relative_bias",
    "attn_norm": "input_layernorm",
    **renamed("ffn_{}", "mlp.{}_proj"),
    "ffn_norm": "post_attention_layernorm",
}
GGUF_CROSS = {f"cross_attn_{own}": f"cross_attn.{own}_proj" for own in "qkvo"}
GGUF_NAMES = TensorNames({
    "token_embd": "model.embed_tokens",
    "dec.output_norm": "model.norm",
    "output": "lm_head",
    **in_layers("dec.blk", {**GGUF_SELF, **GGUF_CROSS, "cross_attn_norm": "cross_attention_layernorm"}),
    "enc.output_norm": "encoder.norm",
    **in_layers("enc.blk", GGUF_SELF, "encoder.layers.{}"),
})  # fmt: skip
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=from_gguf_header,
    to_gguf=bert.FAMILY.to_gguf,
    safetensors=NAMES,
    gguf_names=GGUF_NAMES,
    # copies of the shared embeddings, and relative biases of cross-attention in the first files
    ignored=(
        r"(en|de)coder\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative.+",
        r"dec\.blk\.0\.cross_attn_rel_b\.weight",
    ),
)
