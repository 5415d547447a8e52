"""The text part of Qwen3-VL with experts: Qwen 3 with experts.

Stacks of experts have inputs as rows in published files, and outputs as rows in those that transformers 5 saves.
Positions have three axes; all are the same for text. Images are not read.
"""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, qwen3moe, qwen3vl, qwen35
from ckdist.models.families.family import Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = replace(qwen3moe.KEYS, aliases={"num_experts": "num_local_experts"}).but(
    defaults={
        "max_position_embeddings": 128000, "num_experts_per_tok": 4, "num_key_value_heads": 16, "num_local_experts": 60,
        "rope_theta": 5e5, "sliding_window": None, "tie_word_embeddings": True,
    },
    only={"norm_topk_prob": True},
    unused=("sliding_window",),  # transformers has no windows in this family
)  # fmt: skip

INPUTS_AS_ROWS = (family.STACKED_EXPERTS[0], "transposed_or_not")


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = from_config.attention(f, n, qk_norm="head")
    experts = lambda: from_config.experts(f, "num_local_experts", "moe_intermediate_size", qwen3moe.ROUTING)
    layers = [LayerSpec(attention, ffn) for ffn in qwen3moe.feed_forwards(f, n.num_layers, experts)]
    ropes = from_config.rotations(f, n, mrope_interleaved=True)
    return from_config.model(f, outer, n, layers, ropes, **from_config.balance(f))


FAMILY = replace(
    qwen3moe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(qwen3moe.ROUTING, rotation=qwen35.ROTATION, axes=True),
    to_gguf=GgufWriter(qwen3vl.written, experts=()),
    safetensors=family.SAFETENSORS_EXPERTS.but({}, family.STACKED_EXPERTS, INPUTS_AS_ROWS),
)
