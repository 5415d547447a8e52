"""BERT (Devlin et al. 2018, arXiv:1810.04805) and models of the same form: MiniLM, BGE, E5, GTE, multilingual too.

It is an encoder: each token attends to all others. There is a norm after each part. In the forward, the last norm of a
layer is the first norm of the next layer.
"""

from dataclasses import replace

from ckdist.errors import ModelFileError
from ckdist.models import from_config, limits
from ckdist.models.blocks.scorer import Scorer
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families.family import GGUF, Family, Fields, GgufHeader, GgufWriter, TensorNames, in_layers
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec, Norms

KEYS = ConfigKeys(
    {
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "pad_token_id": 0,
        "type_vocab_size": 2,
    },
    only={"position_embedding_type": "absolute"},
    unused=("tie_word_embeddings", "sbert_ce_default_activation_function"),  # heads of other tasks; a scorer reads it
)  # fmt: skip
NORMS = Norms(replaces_stream=(True, True))
RANK = 4  # pooling_type of a cross-encoder
FUNCTIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
ROBERTA = ("roberta", "xlm-roberta", "camembert")  # their positions begin after the id of the padding token


def scores_pairs(f: Fields) -> bool:
    """True if the model is a cross-encoder. Raises ModelFileError for a classifier with several classes."""
    names = f.raw("architectures")
    if not (isinstance(names, list) and names and str(names[0]).endswith("ForSequenceClassification")):
        return False
    classes = f.raw("id2label")
    if f.integer("num_labels", len(classes) if isinstance(classes, dict) else 2, low=0) != 1:
        raise f.error("num_labels", f.raw("num_labels") or classes, "1: of classifiers cross-encoders are read")
    return True


def takes_sigmoid(f: Fields) -> bool:
    """True if a score is the sigmoid of the output, by the field of sentence-transformers.

    Raises ModelFileError for any other function.
    """
    given = f.sub("sentence_transformers").text("activation_fn", f.text("sbert_ce_default_activation_function", ""))
    name = given.rpartition(".")[2] or "Sigmoid"
    if name not in ("Sigmoid", "Identity"):
        raise f.error("activation_fn", given, "Sigmoid or Identity")
    return name == "Sigmoid"


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. Raises ModelFileError for a decoder, or for relative positions."""
    del outer  # there are no multimodal encoders
    n = from_config.sizes(f, "layer_norm_eps")
    first = f.integer("pad_token_id", low=0) + 1 if f.text("model_type", "bert") in ROBERTA else 0
    if n.max_position <= first:
        raise ModelFileError(f"{f.where}: {n.max_position} positions leave none behind the first {first}")
    return replace(
        model(n, feed_forward(f), f.integer("type_vocab_size", low=0)), max_position=n.max_position - first,
        first_position=first, scorer=Scorer(sigmoid=takes_sigmoid(f)) if scores_pairs(f) else None,
    )  # fmt: skip


def feed_forward(f: Fields) -> DenseFfn:
    """Reads the feed-forward of a layer from a config.json."""
    size = f.integer("intermediate_size", high=limits.MAX_FFN)
    return DenseFfn(size, from_config.activation(f, known=FUNCTIONS), bias=True, gated=False)


def model(n: from_config.Sizes, ffn: DenseFfn, token_types: int) -> ModelSpec:
    """A model of these sizes, with learned embeddings for all positions."""
    attention = n.attention(rope=None, qkv_bias=True, o_bias=True, bidirectional=True)
    layers = (LayerSpec(attention, ffn, NORMS),) * n.num_layers
    return n.model(layers, {}, False, norm="layer_bias", positions=n.max_position, token_types=token_types)


def gguf_sizes(header: GgufHeader) -> from_config.Sizes:
    """Reads the sizes from a GGUF file. Raises ModelFileError for a cross-encoder or a decoder."""
    f = header.fields
    if f.integer("pooling_type", 0, low=-1) == RANK:
        raise f.error("pooling_type", RANK, "0 to 3: cross-encoders are read from folders of safetensors")
    if f.flag("attention.causal"):
        raise f.error("attention.causal", True, "false: of BERT encoders alone are read")
    return header.sizes("attention.layer_norm_epsilon")


def from_gguf_header(header: GgufHeader) -> ModelSpec:
    """Reads a GGUF file. In it, RoBERTa's table of positions lacks the rows before the first position."""
    n, positions = gguf_sizes(header), header.rows("position_embd")
    ffn = DenseFfn(header.ffn_size(), "gelu", bias=True, gated=False)
    spec = model(n, ffn, header.rows("token_types"))
    return replace(spec, positions=positions, max_position=min(n.max_position, positions))


OF_LAYER = {
    **{f"attention.self.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
}
NAMES = TensorNames(
    {
        "embeddings.word_embeddings": "model.embed_tokens",
        "embeddings.position_embeddings": "model.embed_positions",
        "embeddings.token_type_embeddings": "model.embed_types",
        "embeddings.LayerNorm": "model.layers.0.input_layernorm",
        "pooler.dense": "model.scorer.dense",
        "classifier": "model.scorer.out",
        **in_layers("encoder.layer", OF_LAYER),
        "encoder.layer.{}.output.LayerNorm": "model.layers.{next}.input_layernorm",
    },
    outer="bert.",
)
GGUF_NAMES = GGUF.but(
    {
        "position_embd": "model.embed_positions",
        "token_types": "model.embed_types",
        "token_embd_norm": "model.layers.0.input_layernorm",
        "blk.{}.attn_output_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.layer_output_norm": "model.layers.{next}.input_layernorm",
    }
)
# heads of other tasks, and tensors that the forward computes itself
IGNORED = (r"(bert\.)?pooler\..+", r"(bert\.)?embeddings\.position_ids", r"(cls|classifier|lm_head)\..+")
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=from_gguf_header,
    to_gguf=GgufWriter(refused="encoders are not exported; serve it from its folder"),
    safetensors=NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
