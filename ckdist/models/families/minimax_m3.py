"""MiniMax-M3: attention in which each kv-head reads chosen blocks of positions, experts with a clamped gate.

MiniMax 2026. Norms multiply by 1 + weight. The first layers have dense attention and a dense feed-forward.
"""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family, gptoss, minimax_m2
from ckdist.models.families.family import Family, GgufHeader, GgufWriter
from ckdist.models.fields import Fields
from ckdist.models.indexers import BlockIndexer
from ckdist.models.spec import DenseFfn, Ffn, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

ACTIVATION, KINDS = gptoss.ACTIVATION, ("full_attention", "minimax_m3_sparse")
SIZES = {  # of the indexer -> (field of the published file, default)
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
KEYS = ConfigKeys(
    {
        **{name: default for name, (_, default) in SIZES.items()},
        "dense_intermediate_size": 12288, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
        "intermediate_size": 3072, "max_position_embeddings": 524288, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 60, "num_key_value_heads": 4, "num_local_experts": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 5e6, "rotary_dim": 64, "routed_scaling_factor": 2.0,
        "shared_intermediate_size": 3072, "vocab_size": 200064,
    },
    aliases={"num_experts": "num_local_experts"},
    only={
        **gptoss.SWIGLU, "attention_output_gate": False, "n_shared_experts": 1, "qk_norm_type": "per_head",
        "scoring_func": "sigmoid", "sparse_init_block": 0, "sparse_score_type": "max", "use_gemma_norm": True,
        "use_qk_norm": True, "use_routing_bias": True, "use_sparse_attention": True,
    },
    unused=(
        *("image_grid_pinpoints", "num_reward_heads", "process_image_mode", "projector_hidden_size"),
        *("merged_hidden_size", "vision_feature_select_strategy", "video_token_index"),
    ),
)  # fmt: skip
ROUTING = Routing(used=4, scores="sigmoid", scale=2.0)


def by_layer(f: Fields, name: str, usual: list[bool]) -> list[bool]:
    """Reads a flag, 0 or 1, for each layer."""
    flags = from_config.layer_kinds(f, len(usual), (0, 1), name)
    return usual if flags is None else [bool(flag) for flag in flags]


def checked(
    i: BlockIndexer, heads: int, kv_heads: int, f: Fields, names: tuple[str, ...] = tuple(SIZES)
) -> BlockIndexer:
    """The indexer. Raises ModelFileError for sizes that cannot be computed. `names`: of their fields in the file."""
    if heads != kv_heads:
        raise f.error(names[0], heads, f"the number of kv-heads, {kv_heads}")
    if i.head_dim % 8:
        raise f.error(names[1], i.head_dim, "a multiple of 8")
    if i.block % 16:
        raise f.error(names[2], i.block, "a multiple of 16")
    if i.local > i.top_k:
        raise f.error(names[4], i.local, f"at most the number of chosen blocks, {i.top_k}")
    return i


def layers(attention: Any, i: BlockIndexer, sparse: list[bool], ffns: list[Ffn]) -> list[LayerSpec]:
    """Makes the layers; those marked in `sparse` have an indexer."""
    mixers = [replace(attention, indexer=i) if one else attention for one in sparse]
    return [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, given = from_config.sizes(f), f.sub("sparse_attention_config")
    f.choice("hidden_act", ("silu", "swigluoai"))  # which both are a clamped SwiGLU here
    heads, *sizes = (
        given.integer(old, f.integer(name, high=limits.MAX_POSITION), high=limits.MAX_POSITION)
        for name, (old, _) in SIZES.items()
    )
    indexer = checked(BlockIndexer(*sizes), heads, n.num_kv_heads, f)
    kinds, ffn_kinds = (
        from_config.layer_kinds(f, n.num_layers, known, name)
        for name, known in (("layer_types", KINDS), ("mlp_layer_types", ("dense", "sparse")))
    )
    usual = by_layer(given, "sparse_attention_freq", [False] * n.num_layers)
    sparse = usual if kinds is None else [kind == KINDS[1] for kind in kinds]
    without = by_layer(given, "sparse_disable_index_value", sparse)
    if any(one and not off for one, off in zip(sparse, without, strict=True)):
        raise given.error("sparse_disable_index_value", without, "1 in all sparse layers: index values are unsupported")
    mixed = by_layer(f, "moe_layer_freq", [True] * n.num_layers)
    mixed = mixed if ffn_kinds is None else [kind == "sparse" for kind in ffn_kinds]
    wide = lambda name: f.integer(name, high=limits.MAX_FFN)
    routing = replace(ROUTING, scale=f.number("routed_scaling_factor", high=1e6))
    more = {"correction_bias": True, "shared_size": wide("shared_intermediate_size")}
    moe = from_config.experts(f, "num_local_experts", "intermediate_size", routing, ACTIVATION, **more)
    ffns = [moe if one else DenseFfn(wide("dense_intermediate_size"), ACTIVATION) for one in mixed]
    ropes = minimax_m2.part_rotations(f, n)
    return from_config.model(f, outer, n, layers(n.attention(qk_norm="head"), indexer, sparse, ffns), ropes)


GGUF = ("head_count", "key_length", "block_size", "top_k", "local_blocks")


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. Layers with experts have an indexer."""
    f, n = header.fields, header.sizes()
    names = tuple(f"attention.indexer.{name}" for name in GGUF)
    heads, *sizes = (f.integer(name, high=limits.MAX_POSITION) for name in names)
    indexer = checked(BlockIndexer(*sizes), heads, n.num_kv_heads, f, names)
    moe = replace(header.experts(ROUTING, shared=True), activation=ACTIVATION)
    ffns = header.feed_forwards(n, moe, activation=ACTIVATION)
    ropes = {"global": header.rotation(n, partial=True)}
    made = layers(header.attention(n), indexer, [isinstance(ffn, MoeFfn) for ffn in ffns], ffns)
    return header.model(n, made, ropes)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError unless layers with experts have indexers, and no others."""
    i, moe = spec.layers[-1].attention.indexer, spec.layers[-1].ffn
    same = [(layer.attention.indexer is None) != isinstance(layer.ffn, MoeFfn) for layer in spec.layers]
    if (
        not isinstance(i, BlockIndexer)
        or not all(same)
        or (isinstance(moe, MoeFfn) and moe.shared_size % moe.intermediate_size)
    ):
        needs = "the same layers have sparse attention and experts, and the shared expert has the width of others"
        raise ArchitectureError(f"{where}: {spec.family} has no GGUF form unless {needs}")
    sizes = (spec.layers[-1].attention.num_kv_heads, i.head_dim, i.block, i.top_k, i.local)
    return {f"attention.indexer.{name}": size for name, size in zip(GGUF, sizes, strict=True)}


OPTIONAL = ("leading_dense_block_count", "expert_shared_count", "expert_gating_func")
INDEX = {f"indexer.{part}": f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")}
MOE = family.renamed("block_sparse_moe.shared_experts.{}_proj", "mlp.shared_expert.{}_proj")
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, experts=(*OPTIONAL, "expert_weights_norm", "expert_weights_scale"), rotated=True),
    safetensors=minimax_m2.FAMILY.safetensors.but_in_layers(MOE, (r".*norm\.weight", "plus_one")),
    gguf_names=family.GGUF_EXPERTS.but_in_layers(INDEX),
)
