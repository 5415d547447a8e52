"""Qwen 3.5 with experts, the text part: all layers have experts and a gated shared expert."""

from ckdist.models.config_keys import sizes
from ckdist.models.families import family, qwen2moe, qwen35
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = qwen35.KEYS.but(
    defaults={
        **sizes(hidden=2048, layers=40, kv_heads=2),
        "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512,
    },
    unused=("intermediate_size",),  # no layer has a dense feed-forward
)  # fmt: skip
ROUTING = Routing(used=8)


def config(f: Fields, outer: Fields) -> ModelSpec:
    return qwen35.model(f, outer, lambda count: [qwen2moe.experts(f, ROUTING)] * count)


def gguf(header: GgufHeader, tiled: bool = True) -> ModelSpec:
    """Reads GGUF metadata. `tiled`: value heads of linear attention have the order of tiles."""
    n, ffn = header.sizes(), header.experts(ROUTING, shared=True)
    layers = [LayerSpec(mixer, ffn) for mixer in qwen35.gguf_mixers(header, n, tiled)]
    return header.model(n, layers, {"global": qwen35.gguf_rotation(header, n)})


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(qwen35.written, ("expert_shared_feed_forward_length",)),
    safetensors=qwen35.SAFETENSORS.but(family.SAFETENSORS_EXPERTS.rules),
    gguf_names=qwen35.GGUF.but(family.EXPERTS),
    gguf_values=qwen35.gguf_values,
)
