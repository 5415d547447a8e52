"""BERT (Devlin et al. 2018, arXiv:1810.04805) and what has its form: MiniLM, BGE, E5, GTE, multilingual ones too.

An encoder: every token sees all others. Norms stand behind each part, so that of a layer's end is, for the forward, the
one that the next layer begins with.
"""

from ckdist.errors import ArchitectureError, ModelFileError
from ckdist.models import from_config
from ckdist.models.families.family import Family, GgufForm, TensorNames
from ckdist.models.fields import Fields
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, Norms, Scorer

NAME = "bert"
NORMS = Norms(replaces_stream=(True, True))
FUNCTIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
ROBERTA = ("roberta", "xlm-roberta", "camembert")  # whose positions begin behind the padding's id


def function(f: Fields, field: str, default: str) -> str:
    """The function of a feed-forward. ModelFileError where it is not known."""
    name = f.text(field, default)
    if name not in FUNCTIONS:
        raise f.error(field, name, f"one of {', '.join(FUNCTIONS)}")
    return FUNCTIONS[name]


def scores_pairs(f: Fields) -> bool:
    """Whether the model is a cross-encoder. ModelFileError for a classifier of several classes."""
    names = f.values.get("architectures")
    if not (isinstance(names, list) and names and str(names[0]).endswith("ForSequenceClassification")):
        return False
    classes = f.values.get("id2label")
    if f.integer("num_labels", len(classes) if isinstance(classes, dict) else 2, low=0) != 1:
        raise f.error("num_labels", f.values.get("num_labels", classes), "1: of classifiers cross-encoders are read")
    return True


def takes_sigmoid(f: Fields) -> bool:
    """Whether a score is the sigmoid of what comes out, as sentence-transformers writes it. ModelFileError for another
    function.
    """
    given = f.sub("sentence_transformers").text("activation_fn", f.text("sbert_ce_default_activation_function", ""))
    name = given.rpartition(".")[2] or "Sigmoid"
    if name not in ("Sigmoid", "Identity"):
        raise f.error("activation_fn", given, "Sigmoid or Identity")
    return name == "Sigmoid"


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json. ModelFileError for a decoder, and for positions that depend on distances."""
    del outer  # encoders of text alone
    if f.flag("is_decoder"):
        raise f.error("is_decoder", True, "false: of BERT encoders alone are read")
    if f.text("position_embedding_type", "absolute") != "absolute":
        raise f.error("position_embedding_type", f.text("position_embedding_type"), "absolute")
    n = from_config.sizes(f, from_config.ConfigDefaults(max_position=512))
    first = f.integer("pad_token_id", 1, low=0) + 1 if f.text("model_type", NAME) in ROBERTA else 0
    if n.max_position <= first:
        raise ModelFileError(f"{f.where}: {n.max_position} positions leave none behind the first {first}")
    attention = Attention(
        n.num_heads, n.num_heads, n.head_dim, n.head_dim**-0.5, rope=None, qkv_bias=True, o_bias=True,
        bidirectional=True,
    )  # fmt: skip
    ffn = DenseFfn(n.intermediate_size, function(f, "hidden_act", "gelu"), bias=True, gated=False)
    return ModelSpec(
        NAME, n.vocab_size, n.hidden_size, (LayerSpec(attention, ffn, NORMS),) * n.num_layers, {},
        f.number("layer_norm_eps", 1e-12, high=1.0), n.max_position - first, norm="layer_bias",
        positions=n.max_position, first_position=first, token_types=f.integer("type_vocab_size", 2, low=0),
        scorer=Scorer(sigmoid=takes_sigmoid(f)) if scores_pairs(f) else None,
    )  # fmt: skip


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Raises ArchitectureError: encoders are not written as GGUF."""
    raise ArchitectureError(f"{where}: {spec.family} is an encoder, which is not exported; serve it from its folder")


TOP = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.layers.0.input_layernorm",
    "pooler.dense": "model.scorer.dense",
    "classifier": "model.scorer.out",
}
LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
}
NAMES = TensorNames(
    top=TOP,
    layer=LAYER,
    prefix="encoder.layer",
    own_names=False,
    next_layer={"output.LayerNorm": "input_layernorm"},
    outer="bert.",
)
# heads of other tasks, and what the forward makes for itself
IGNORED = (r"(bert\.)?pooler\..+", r"(bert\.)?embeddings\.position_ids", r"(cls|classifier|lm_head)\..+")
FAMILY = Family(
    name=NAME,
    architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    model_types=(NAME,),
    gguf=NAME,
    from_config=config,
    from_gguf=None,
    to_gguf=export,
    safetensors=NAMES,
    gguf_names=NAMES,
    ignored=IGNORED,
)
