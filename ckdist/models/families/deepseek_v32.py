"""DeepSeek-V3.2: V3 with a lightning indexer in each layer, which chooses the positions that a token sees."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import limits
from ckdist.models.families import deepseek_v2, deepseek_v3
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.indexers import Indexer
from ckdist.models.spec import LatentAttention, ModelSpec

INDEX = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "indexer_rope_interleave": False}
KEYS = deepseek_v3.KEYS.but(
    defaults={**INDEX, "max_position_embeddings": 163840, "q_lora_rank": 1536},
    aliases={"layer_types": "indexed_layer_types"},
    unused=("indexed_layer_types",),  # all layers are sparse
)


def with_indexers(spec: ModelSpec, f: Fields, indexer: Indexer, full: list[bool]) -> ModelSpec:
    """The model with an indexer in the layers of `full`. The others see the positions of the layer before.

    Rotation "local" has the frequencies of "global", in halves: for an indexer that rotates unlike the attention.
    """
    if not full[0]:
        raise f.error("indexer_types", full, 'a list that begins with "full"')
    rotation = spec.ropes["global"]
    if indexer.head_dim < rotation.dims or indexer.head_dim % 8:
        raise f.error("index_head_dim", indexer.head_dim, f"a multiple of 8 and at least {rotation.dims}, as rotated")
    mixers = [
        replace(mixer, **({"indexer": indexer} if own else {"shares_positions": True}))
        for mixer, own in zip(spec.mixers(LatentAttention), full, strict=True)
    ]
    ropes = {**spec.ropes, **({} if indexer.rope == "global" else {"local": replace(rotation, interleaved=False)})}
    return replace(spec.with_layers(mixer=mixers), ropes=ropes)


def sparse_model(f: Fields, outer: Fields, full: list[bool] | None = None) -> ModelSpec:
    """Reads a config.json. `full`: whether each layer has an indexer; None: all have."""
    spec = deepseek_v2.model(f, outer)
    same = f.flag("indexer_rope_interleave") == f.flag("rope_interleave")
    indexer = replace(config_indexer(f), rope="global" if same else "local")
    return with_indexers(spec, f, indexer, full or [True] * len(spec.layers))


def config_indexer(f: Fields) -> Indexer:
    """Reads the indexer from a config.json."""
    f.integer("q_lora_rank", high=limits.MAX_WIDTH)  # which it reads
    return Indexer(
        f.integer("index_n_heads", high=limits.MAX_HEADS),
        f.integer("index_head_dim", high=limits.MAX_HEAD_DIM),
        f.integer("index_topk", high=limits.MAX_POSITION),
    )


def gguf_indexer(f: Fields, rope: str) -> Indexer:
    """Reads the indexer from GGUF metadata."""
    return Indexer(
        f.integer("attention.indexer.head_count", high=limits.MAX_HEADS),
        f.integer("attention.indexer.key_length", high=limits.MAX_HEAD_DIM),
        f.integer("attention.indexer.top_k", high=limits.MAX_POSITION),
        rope,
    )


def gguf(header: GgufHeader) -> ModelSpec:
    spec = deepseek_v2.gguf_model(header, deepseek_v2.ROUTING)
    return with_indexers(spec, header.fields, gguf_indexer(header.fields, "local"), [True] * len(spec.layers))


def sparse_form(
    architecture: str, spec: ModelSpec, where: str, rope: str, more: Mapping[str, Any] | None = None
) -> GgufForm:
    """Returns the GGUF metadata of a model. `more` are further values.

    Raises ArchitectureError if its indexer is rotated otherwise.
    """
    indexer = spec.mixers(LatentAttention)[0].indexer
    assert indexer
    if indexer.rope != rope:
        raise ArchitectureError(f"{where}: indexer_rope_interleave {rope != 'global'} has no GGUF form")
    return deepseek_v2.yarn_form(architecture, spec, where, {**written_indexer(indexer), **(more or {})})


def written_indexer(i: Indexer) -> dict[str, Any]:
    """GGUF metadata of the indexer."""
    values = {"head_count": i.num_heads, "key_length": i.head_dim, "top_k": i.top_k}
    return {f"attention.indexer.{name}": value for name, value in values.items()}


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    return sparse_form("deepseek32", spec, where, "local")


INDEXER = {"attn_k": "wk", "attn_q_b": "wq_b", "k_norm": "k_norm", "proj": "weights_proj"}
NAMES = {f"indexer.{name}": f"self_attn.indexer.{part}" for name, part in INDEXER.items()}
FAMILY = replace(
    deepseek_v3.FAMILY,
    keys=KEYS,
    from_config=sparse_model,
    from_gguf=gguf,
    to_gguf=export,
    gguf_names=deepseek_v2.GGUF_NAMES.but_in_layers(NAMES),
)
