"""Jais 2: Llama with layer norms, biases, and feed-forwards without a gate, down(relu(up x)^2)."""

from dataclasses import replace

from ckdist.models.families import arcee, family
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import ModelSpec

NORM = "layer_bias"
EPSILON = "attention.layer_norm_epsilon"
KEYS = arcee.KEYS.but(
    defaults={
        "attention_bias": True, "hidden_size": 3328, "intermediate_size": 26624, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "mlp_bias": True, "num_attention_heads": 26, "rms_norm_eps": None,
        "vocab_size": 150272,
    },
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    return replace(arcee.config(f.but({"rms_norm_eps": f.number("layer_norm_eps", high=1.0)}), outer), norm=NORM)


def gguf(header: GgufHeader) -> ModelSpec:
    return arcee.gguf(header, EPSILON, norm=NORM)


def written(spec: ModelSpec, *_: str) -> dict[str, object]:
    return {EPSILON: float(spec.norm_eps)}


FAMILY = replace(
    arcee.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, rotated=True),
    gguf_names=family.GGUF,
)
