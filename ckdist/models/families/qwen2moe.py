"""Qwen 1.5 and 2 with experts, and a gated shared expert."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import family, qwen3moe
from ckdist.models.families.family import Family, Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

KEYS = replace(qwen3moe.KEYS, aliases={}).but(
    defaults={
        "num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True, "shared_expert_intermediate_size": 5632,
    },
    unused=("attention_bias", "max_window_layers", "sliding_window"),
)  # fmt: skip
ROUTING = Routing(used=4, renormalise=False)


def experts(f: Fields, routing: Routing) -> MoeFfn:
    """Reads the experts and the gated shared expert from a config.json."""
    shared = f.integer("shared_expert_intermediate_size", high=limits.MAX_FFN)
    sizes = ("num_experts", "moe_intermediate_size")
    return from_config.experts(f, *sizes, routing, shared_size=shared, shared_gate=True)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    if f.flag("use_sliding_window") or any(from_config.sliding_layers(f, n.num_layers, [])):
        raise f.error("use_sliding_window", True, "false: windows of this family are not supported")
    attention = n.attention(qkv_bias=f.flag("qkv_bias"))
    routing = replace(ROUTING, renormalise=f.flag("norm_topk_prob"))
    layers = [LayerSpec(attention, ffn) for ffn in qwen3moe.feed_forwards(f, n.num_layers, lambda: experts(f, routing))]
    return from_config.model(f, outer, n, layers, **from_config.balance(f))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(ROUTING, shared=True),
    to_gguf=GgufWriter(experts=("expert_shared_feed_forward_length",), renormalised=True),
    safetensors=family.SAFETENSORS_EXPERTS,
    gguf_names=family.GGUF_EXPERTS,
)
