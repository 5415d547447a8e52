"""dots3-note: its layers, and its form in GGUF."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import limits, rope
from ckdist.models.families import deepseek_v2, deepseek_v32
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.spec import LatentAttention, ModelSpec

GGUF = "dots3note"
NAMES = deepseek_v2.GGUF_NAMES.but_in_layers(
    {**deepseek_v32.NAMES, "attn_gate": "self_attn.g_proj", "attn_k_norm": "self_attn.k_rope_only_layernorm"}
)


def mixed_model(spec: ModelSpec, sliding: Sequence[bool], sizes: Sequence[int], q_rank: int, window: int) -> ModelSpec:
    """Makes a model of one whose layers are all sparse.

    `sizes` of sliding layers: heads, kv_lora_rank, unrotated elements of a head's key, and elements of its value.
    """
    heads, rank, nope, value = sizes
    mixers = [
        replace(mixer, gated=True, key_norm=True, norm_eps=0.0) for mixer in spec.mixers(LatentAttention)
    ]  # fmt: skip
    slide = replace(
        mixers[0], num_heads=heads, kv_lora_rank=rank, nope_dim=nope, v_dim=value, q_lora_rank=q_rank, rope="local",
        scale=(nope + mixers[0].rope_dim) ** -0.5, window=window, indexer=None, shares_positions=False,
    )  # fmt: skip
    return spec.with_layers(mixer=[slide if slides else full for full, slides in zip(mixers, sliding, strict=True)])


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    f, pattern, counts = header.fields, "attention.sliding_window_pattern", "attention.head_count"
    sliding, heads = f.raw(pattern), f.raw(counts)
    count = f.integer("block_count", high=limits.MAX_LAYERS) - f.integer("nextn_predict_layers", 0, low=0)
    if not isinstance(sliding, np.ndarray) or sliding.dtype != bool or not 0 < count <= len(sliding):
        raise f.error(pattern, str(sliding)[:40], f"one flag for each of {count} layers")
    if not isinstance(heads, np.ndarray) or heads.dtype.kind not in "iu" or len(heads) < count:
        raise f.error(counts, str(heads)[:40], f"one number for each of {count} layers")
    sliding, heads, types = sliding[:count], heads[:count], "attention.indexer.types"
    if f.has(types) and not np.array_equal(np.asarray(f.raw(types))[:count], ~sliding):
        raise f.error(types, str(f.raw(types))[:40], "true for all layers that do not slide")
    both = [np.unique(heads[sliding == slides]).tolist() for slides in (False, True)]
    if len(both[0]) != 1 or len(both[1]) > 1:
        raise f.error(counts, both, "one number for sparse layers, and one for sliding layers")
    spec = deepseek_v2.gguf_model(header.but({counts: both[0][0]}))
    spec = deepseek_v32.with_indexers(spec, f, deepseek_v32.gguf_indexer(f, "global"), [True] * count)
    key, value, rank = (
        f.integer(f"attention.{name}_swa", high=limits.MAX_HEAD_DIM if "mla" in name else limits.MAX_LATENT)
        for name in ("key_length_mla", "value_length_mla", "kv_lora_rank")
    )
    r, q_rank = spec.ropes["global"], spec.mixers(LatentAttention)[0].q_lora_rank
    if key <= r.dims:
        raise f.error("attention.key_length_mla_swa", key, f"above rope.dimension_count, which is {r.dims}")
    local = rope.unscaled(r.dims, f.number("rope.freq_base_swa", low=1.0), interleaved=True)
    sizes = (*(both[1] or [1]), rank, key - r.dims, value)
    window = f.integer("attention.sliding_window", high=limits.MAX_POSITION)
    spec = replace(spec, ropes={**spec.ropes, "local": local})
    return mixed_model(spec, sliding.tolist(), sizes, q_rank, window)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    mixers = spec.mixers(LatentAttention)
    full = next((one for one in mixers if not one.window), None)
    slide = next((one for one in mixers if one.window), None)
    if full is None or slide is None or slide.q_lora_rank != full.q_lora_rank:
        needs = "both kinds of layers of one q_lora_rank"
        raise ArchitectureError(f"{where}: {spec.family} without {needs} has no GGUF form")
    more = {
        "attention.head_count": [one.num_heads for one in mixers],
        "attention.indexer.types": [not one.window for one in mixers],
        "attention.key_length_mla_swa": slide.head_dim,
        "attention.key_length_swa": slide.key_width,
        "attention.kv_lora_rank_swa": slide.kv_lora_rank,
        "attention.sliding_window": slide.window,
        "attention.sliding_window_pattern": [one.window > 0 for one in mixers],
        "attention.value_length_mla_swa": slide.v_dim,
        "attention.value_length_swa": slide.kv_lora_rank,
        "rope.freq_base_swa": float(spec.ropes["local"].theta),
    }
    return deepseek_v32.sparse_form(GGUF, spec.with_layers(mixer=[full] * len(mixers)), where, "global", more)
