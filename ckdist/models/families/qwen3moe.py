"""Qwen 3 with experts in place of the feed-forward, in all layers or in some."""

from collections.abc import Callable
from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, GgufReader, GgufWriter
from ckdist.models.spec import Ffn, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

KEYS = llama.KEYS.but(
    defaults={
        "decoder_sparse_step": 1, "max_position_embeddings": 32768, "num_experts_per_tok": 8, "num_key_value_heads": 4,
        "router_aux_loss_coef": 0.001, "sliding_window": 4096,
    },
    aliases={"num_local_experts": "num_experts"},
    nulls={"sliding_window": None},
    unused=(
        *("intermediate_size", "max_window_layers"),  # if all layers have experts; if all layers have windows
        *("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),  # if none
    ),
)  # fmt: skip
ROUTING = Routing(used=8)


def sparse_layers(f: Fields, num_layers: int) -> list[bool]:
    """Reads whether each layer has experts."""
    step, dense = f.integer("decoder_sparse_step", high=limits.MAX_LAYERS), f.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise f.error("mlp_only_layers", dense, "a list of layers")
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def feed_forwards(f: Fields, num_layers: int, experts: Callable[[], MoeFfn]) -> list[Ffn]:
    """Reads the feed-forwards of all layers. Fields that no layer needs are not read."""
    sparse = sparse_layers(f, num_layers)
    made = {has_experts: experts() if has_experts else from_config.dense(f) for has_experts in set(sparse)}
    return [made[has_experts] for has_experts in sparse]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    window = from_config.window(f) * f.flag("use_sliding_window")
    attention = from_config.attention(f, n, window=window, qk_norm="head")
    routing = replace(ROUTING, renormalise=f.flag("norm_topk_prob"))
    experts = lambda: from_config.experts(f, "num_experts", "moe_intermediate_size", routing)
    layers = [LayerSpec(attention, ffn) for ffn in feed_forwards(f, n.num_layers, experts)]
    return from_config.model(f, outer, n, layers, **from_config.balance(f))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(ROUTING),
    to_gguf=GgufWriter(experts=(), windows="use_sliding_window to false", renormalised=False),
    safetensors=family.SAFETENSORS_EXPERTS,
    gguf_names=family.GGUF_EXPERTS,
)
