"""Qwen 3.5 with experts, the text part: Qwen 3.5 with a mixture of experts and a gated shared one in all layers."""

from dataclasses import replace

from ckdist.models import from_config, from_gguf, limits, to_gguf
from ckdist.models.families import family, qwen35
from ckdist.models.families.family import Family, GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

NAME = "qwen35moe"
DEFAULTS = replace(qwen35.DEFAULTS, layers=40, kv_heads=2)
ROUTING = Routing(used=8)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    n = from_config.sizes(f, DEFAULTS)
    shared = f.integer("shared_expert_intermediate_size", 512, high=limits.MAX_FFN)
    ffn = from_config.experts(f, "num_experts", "moe_intermediate_size", ROUTING, shared_size=shared, shared_gate=True)
    layers = [LayerSpec(mixer, ffn) for mixer in qwen35.mixers(f, n)]
    ropes = from_config.rotations(f, n, partial=qwen35.PARTIAL)
    return n.model(NAME, layers, ropes, from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """From GGUF metadata."""
    n, ffn = qwen35.gguf_sizes(header), from_gguf.experts(header, ROUTING, shared=True)
    layers = [LayerSpec(mixer, ffn) for mixer in qwen35.gguf_mixers(header, n, tiled=True)]
    rope = from_gguf.rotation(header, n, 1e7, partial=True)
    return n.model(NAME, layers, {"global": rope}, from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """As GGUF metadata. ArchitectureError for what GGUF's readers cannot be told."""
    more = {
        **to_gguf.experts(spec, where, ("expert_shared_feed_forward_length",)),
        **qwen35.hybrid_metadata(spec, where),
        "rope.dimension_sections": qwen35.sections(spec.ropes["global"].dims // 2),
    }
    return to_gguf.dense(NAME, spec, where, more)


FAMILY = Family(
    name=NAME,
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    gguf=NAME,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=replace(qwen35.SAFETENSORS, layer={**family.SAFETENSORS_EXPERTS.layer, **qwen35.SAFETENSORS.layer}),
    gguf_names=replace(qwen35.GGUF, layer={**family.GGUF_EXPERTS.layer, **qwen35.GGUF.layer}),
    ignored=family.ROTATIONS,
    gguf_values=qwen35.gguf_values,
)
