"""The text part of Qwen2-VL and Qwen2.5-VL: Qwen 2 whose positions have three axes; all are the same for text.

Images are not read.
"""

from dataclasses import replace

from ckdist.models.families import qwen2, qwen35
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

NAME, GGUF = "qwen25vl", "qwen2vl"
KEYS = qwen2.KEYS.but(
    defaults={
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "max_window_layers": 80,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 152064,
    },
    unused=("vision_token_id",),
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    return replace(qwen2.config(f, outer), family=NAME)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    spec = qwen2.gguf(header)
    rotation = from_gguf.three_axes(header, spec.ropes["global"], is_interleaved=False)
    return replace(spec, family=NAME, ropes={"global": rotation})


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError for windows."""
    from ckdist.models import to_gguf

    what = f"a sliding window ({{window}}) of {NAME} has no GGUF form"
    to_gguf.refuse_windows(spec, where, what, "set use_sliding_window to false")
    return to_gguf.dense(GGUF, spec, where, {"rope.dimension_sections": qwen35.sections(spec.ropes["global"])})


FAMILY = replace(
    qwen2.FAMILY,
    name=NAME,
    architectures=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    model_types=("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"),
    keys=KEYS,
    gguf=GGUF,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
)
