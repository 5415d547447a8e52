"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): an encoder with rotary positions and gated feed-forwards.

It has norms before each part, and windows in most layers.
"""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.blocks.scorer import Scorer
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import bert
from ckdist.models.families.family import Family, Fields, TensorNames, in_layers
from ckdist.models.rope import RopeShape, from_fields
from ckdist.models.spec import LayerSpec, ModelSpec, Norms, RopeSpec

KEYS = ConfigKeys(
    {
        "classifier_activation": "gelu", "classifier_pooling": "cls", "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "hidden_activation": "gelu", "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "norm_eps": 1e-5,
    },
    unused=(  # of other heads, or old
        *("classifier_bias", "layer_norm_eps", "position_embedding_type", "tie_word_embeddings"),
        *("sbert_ce_default_activation_function", "classifier_activation", "classifier_pooling"),
    ),
)  # fmt: skip
FIRST_NORMS = Norms(replaces_stream=(True, False))  # the norm of the embeddings is that of the first layer


def config(f: Fields, outer: Fields) -> ModelSpec:
    del outer  # there are no multimodal encoders
    n = from_config.sizes(f, "norm_eps")
    period = f.integer("global_attn_every_n_layers")
    sliding = from_config.sliding_layers(f, n.num_layers, [bool(i % period) for i in range(n.num_layers)])
    reach = f.integer("local_attention", low=2) // 2  # visible tokens on each side
    ffn = from_config.dense(f, from_config.activation(f, "hidden_activation", bert.FUNCTIONS), f.flag("mlp_bias"))
    full = from_config.attention(f, n, bidirectional=True)
    kinds = {False: full, True: replace(full, rope="local", window=reach + 1)}
    layers = [LayerSpec(kinds[slides], ffn, Norms() if i else FIRST_NORMS) for i, slides in enumerate(sliding)]
    norm = "layer_bias" if f.flag("norm_bias") else "layer"
    scorer = _scorer(f, norm) if bert.scores_pairs(f) else None
    return n.model(layers, _rotations(f, n.head_dim, n.max_position), False, norm=norm, scorer=scorer)


def _scorer(f: Fields, norm: str) -> Scorer:
    """Reads the scorer of a cross-encoder. Raises ModelFileError for an unknown pooling."""
    pooling = f.choice("classifier_pooling", ("cls", "mean"))
    function = from_config.activation(f, "classifier_activation", bert.FUNCTIONS)
    return Scorer(function, f.flag("classifier_bias"), norm, pooling == "mean", bert.takes_sigmoid(f))


def _rotations(f: Fields, head_dim: int, max_position: int) -> dict[str, RopeSpec]:
    """Reads the rotations of layers without and with a window."""
    parameters, found = f.sub("rope_parameters"), {}
    for name, kind in (("global", "full_attention"), ("local", "sliding_attention")):
        shape = RopeShape(head_dim, max_position, f.number(f"{name}_rope_theta", low=1.0))
        found[name] = from_fields(parameters.sub(kind), shape, f)
    return found


LAYER = {
    "attn_norm": "input_layernorm",
    "attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.Wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.Wo": "mlp.down_proj",
}
NAMES = TensorNames(
    {
        "embeddings.tok_embeddings": "model.embed_tokens",
        "embeddings.norm": "model.layers.0.input_layernorm",
        "final_norm": "model.norm",
        "head.dense": "model.scorer.dense",
        "head.norm": "model.scorer.norm",
        "classifier": "model.scorer.out",
        **in_layers("layers", LAYER),
    },
    outer="model.",
)
FAMILY = Family(
    keys=KEYS,
    gguf="modern-bert",
    from_config=config,
    to_gguf=bert.FAMILY.to_gguf,
    safetensors=NAMES,
    gguf_names=NAMES,
    ignored=(r"(head|decoder|classifier)\..+",),
)
