"""GLM-5, 5.1 and 5.2: GLM-4.7-Flash in other sizes, with lightning indexers. Their GGUF architecture is glm-dsa.

In GLM-5.2 a layer with an indexer is followed by layers that see the same positions.
"""

from dataclasses import replace

import numpy as np

from ckdist.models.families import deepseek_v2, deepseek_v32
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import LatentAttention, ModelSpec

KEYS = deepseek_v32.KEYS.but(
    defaults={
        "index_n_heads": 32, "index_skip_topk_offset": 2, "index_topk_freq": 1, "indexer_rope_interleave": True,
        "max_position_embeddings": 202752, "n_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5, "topk_group": 1, "v_head_dim": 256,
    },
    unused=("index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern"),
)  # fmt: skip
TYPES = {"full": True, "shared": False, "F": True, "S": False}
SHARING_CONTEXT = 1048576  # of GLM-5.2: GGUF files without types are of 5.2 from this context length on


def period(count: int, every: int, first: int = 3) -> list[bool]:
    """True for each layer that has an indexer: the first ones, and then one of `every`."""
    return [max(i - first + 1, 0) % every == 0 for i in range(count)]


def indexer_layers(f: Fields) -> list[bool]:
    """Reads from a config.json whether each layer has an indexer."""
    count = f.integer("num_hidden_layers")
    name = "indexer_types" if f.has("indexer_types") else "index_topk_pattern"
    if (types := f.raw(name)) is None:
        every, first = f.integer("index_topk_freq", low=0), f.integer("index_skip_topk_offset", low=0)
        return period(count, max(every, 1), first)
    if not isinstance(types, str | list) or len(types) != count or any(str(one) not in TYPES for one in types):
        raise f.error(name, types, f"{count} of full and shared")
    return [TYPES[one] for one in types]


def config(f: Fields, outer: Fields) -> ModelSpec:
    return deepseek_v32.sparse_model(f, outer, indexer_layers(f))


def gguf(header: GgufHeader) -> ModelSpec:
    f, name = header.fields, "attention.indexer.types"
    if not header.has_any(".exp_probs_b.bias") and not f.has("expert_gating_func"):
        header = header.but({"expert_gating_func": 2})
    spec = deepseek_v2.gguf_model(header)
    count, full = len(spec.layers), f.raw(name)
    if full is None:
        full = np.array(period(count, 4 if spec.max_position >= SHARING_CONTEXT else 1))
    if not isinstance(full, np.ndarray) or full.dtype != bool or len(full) < count:
        raise f.error(name, full, f"one flag for each of {count} layers")
    return deepseek_v32.with_indexers(spec, f, deepseek_v32.gguf_indexer(f, "global"), full[:count].tolist())


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    full = [mixer.indexer is not None for mixer in spec.mixers(LatentAttention)]
    return deepseek_v32.sparse_form("glm-dsa", spec, where, "global", {"attention.indexer.types": full})


FAMILY = replace(deepseek_v32.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=export)
