"""Hunyuan-A13B: all layers have experts and a shared expert; queries and keys are normed after their rotation."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, GgufReader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

KEYS = llama.KEYS.but(
    defaults={"moe_topk": 1, "num_experts": 1, "rms_norm_eps": 1e-5},
    aliases={"attention_head_dim": "head_dim", "num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    only={
        "group_limited_greedy": False, "moe_layer_num_skipped": 0, "norm_topk_prob": True, "norm_type": "rms",
        "position_embedding_xdrope": False, "routed_scaling_factor": 1.0, "use_cla": False, "use_mixed_mlp_moe": True,
        "use_mla": False, "use_qk_norm": True,
    },
    unused=(
        *("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"),  # of the rotation, if it has `alpha`
        *("add_classification_head", "class_num", "cla_share_factor", "dense_list", "pool_type", "skip_cls_token"),
        *("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "pad_id", "text_end_id"),
        *("text_start_id", "video_end_id", "video_start_id", "org_vocab_size", "anyres_pooling_size"),
        *("moe_drop_tokens", "moe_random_routing_dropped_token"),
    ),
)  # fmt: skip
ROUTING = Routing(used=1)
NORMS = {"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"}


def attention(f: Fields, n: Sizes) -> Attention:
    """Reads the attention of a layer from a config.json."""
    return from_config.attention(f, n, qk_norm="head", norms_rotated=True)


def every_layer(f: Fields, name: str, high: int, default: int | None = None) -> int:
    """Reads a number that may be a list with one for each layer. Raises ModelFileError if layers differ."""
    value = f.raw(name)
    if not isinstance(value, list):
        return f.integer(name, *([] if default is None else [default]), high=high)
    if not value or any(each != value[0] for each in value):
        raise f.error(name, value, "the same in every layer")
    return f.but({name: value[0]}).integer(name, high=high)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    size = f.integer("intermediate_size", high=limits.MAX_FFN)
    for name, needed in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if (given := every_layer(f, name, limits.MAX_FFN, needed)) != needed:
            raise f.error(name, given, f"{needed}: the width of experts is intermediate_size, and one is shared")
    routing = replace(ROUTING, used=every_layer(f, "moe_topk", limits.MAX_EXPERTS))
    count = every_layer(f, "num_experts", limits.MAX_EXPERTS)
    ffn = MoeFfn(count, size, routing, from_config.activation(f), shared_size=size)
    return from_config.model(f, outer, n, [LayerSpec(attention(f, n), ffn)] * n.num_layers)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(ROUTING, shared=True, attention={"norms_rotated": True}),
    to_gguf=GgufWriter(experts=("expert_shared_count", "expert_shared_feed_forward_length")),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {"mlp.gate.wg": "mlp.gate", **family.renamed("mlp.shared_mlp.{}_proj", "mlp.shared_expert.{}_proj"), **NORMS}
    ),
    gguf_names=family.GGUF_EXPERTS,
)  # fmt: skip
