"""T5 (Raffel et al. 2020, arXiv:1910.10683), its version 1.1, Flan-T5 and mT5; and its encoder alone, as sentence-T5.

Biases of scores by distance stand for positions, queries are not scaled, norms have no mean.
"""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import bert
from ckdist.models.families.family import Family, TensorNames
from ckdist.models.fields import Fields
from ckdist.models.spec import Attention, CrossAttention, DenseFfn, LayerSpec, ModelSpec, RelativeBias

NAME = "t5"
MAX_POSITION = 1 << 15  # distances have no end; so many tokens a sequence may have
FUNCTIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    heads, width = f.integer("num_heads", 8, high=limits.MAX_HEADS), f.integer("d_kv", 64, high=limits.MAX_HEAD_DIM)
    buckets = f.integer("relative_attention_num_buckets", 32, low=4, high=1 << 12)
    distance = f.integer("relative_attention_max_distance", 128, low=buckets, high=1 << 16)
    attention = Attention(heads, heads, width, 1.0, rope=None, relative=RelativeBias(buckets, distance))
    ffn, count = _ffn(f), f.integer("num_layers", 6, high=limits.MAX_LAYERS)
    vocab, hidden = f.integer("vocab_size", 32128, high=limits.MAX_VOCAB), f.integer("d_model", high=limits.MAX_WIDTH)
    eps, encodes = f.number("layer_norm_epsilon", 1e-6, high=1.0), replace(attention, bidirectional=True)
    encoder = ModelSpec(
        NAME, vocab, hidden, (LayerSpec(encodes, ffn),) * count, {}, eps, MAX_POSITION, root="encoder"
    )  # fmt: skip
    names = f.values.get("architectures")
    if isinstance(names, list) and str(names[0]).endswith("EncoderModel"):
        return encoder
    cross = CrossAttention(Attention(heads, heads, width, 1.0, rope=None))
    layers = (LayerSpec(attention, ffn, cross=cross),) * f.integer("num_decoder_layers", count, high=limits.MAX_LAYERS)
    tied = from_config.tied(f, outer, True)
    return ModelSpec(
        NAME, vocab, hidden, layers, {}, eps, MAX_POSITION, tied, logit_scale=hidden**-0.5 if tied else 1.0,
        encoder=encoder, start_tokens=(f.integer("decoder_start_token_id", 0, low=0, high=vocab - 1),),
    )  # fmt: skip


def _ffn(f: Fields) -> DenseFfn:
    """The feed-forward, whose name says whether it is gated. ModelFileError for a function that is not known."""
    given = f.text("feed_forward_proj", "relu")
    name, gated = given.removeprefix("gated-"), given.startswith("gated-")
    name = "gelu_new" if given == "gated-gelu" else name
    if name not in FUNCTIONS:
        raise f.error("feed_forward_proj", given, f"gated- or not, and one of {', '.join(FUNCTIONS)}")
    return DenseFfn(f.integer("d_ff", 2048, high=limits.MAX_FFN), FUNCTIONS[name], gated=gated)


def _attention(part: str, path: str) -> dict[str, str]:
    """The names of an attention's matrices."""
    return {f"{part}.{own}": f"{path}.{own}_proj" for own in "qkvo"}


def _feed_forward(number: int) -> dict[str, str]:
    """The names of a feed-forward's matrices, which is a layer's part of this number."""
    stem, own = f"layer.{number}.DenseReluDense", {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
    return {f"{stem}.{name}": f"mlp.{part}_proj" for name, part in own.items()}


SELF = {
    **_attention("layer.0.SelfAttention", "self_attn"),
    "layer.0.SelfAttention.relative_attention_bias": "self_attn.relative_bias",
    "layer.0.layer_norm": "input_layernorm",
}
ENCODER = TensorNames(
    top={"encoder.final_layer_norm": "model.norm"},
    layer={**SELF, **_feed_forward(1), "layer.1.layer_norm": "post_attention_layernorm"},
    prefix="encoder.block",
    own_names=False,
)
NAMES = TensorNames(
    top={"shared": "model.embed_tokens", "decoder.final_layer_norm": "model.norm", "lm_head": "lm_head"},
    layer={
        **SELF,
        **_attention("layer.1.EncDecAttention", "cross_attn"),
        "layer.1.layer_norm": "cross_attention_layernorm",
        **_feed_forward(2),
        "layer.2.layer_norm": "post_attention_layernorm",
    },
    prefix="decoder.block",
    own_names=False,
    encoder=ENCODER,
)
FAMILY = Family(
    name=NAME,
    architectures=(
        "T5ForConditionalGeneration",
        "MT5ForConditionalGeneration",
        "T5WithLMHeadModel",
        "T5EncoderModel",
        "MT5EncoderModel",
    ),
    model_types=(NAME, "mt5"),
    gguf=NAME,
    from_config=config,
    from_gguf=None,
    to_gguf=bert.export,
    safetensors=NAMES,
    gguf_names=NAMES,
    # copies of the shared embeddings, and biases that the first files had for distances in cross-attention
    ignored=(r"(en|de)coder\.embed_tokens\.weight", r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative.+"),
)
