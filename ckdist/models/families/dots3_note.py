"""dots3-note: sparse latent attention in some layers, latent attention of other sizes with windows in the others.

Heads have gates, and the keys that heads share are normed before their rotation. The indexer rotates neighbouring
elements together, as transformers and vLLM compute it; llama.cpp rotates halves.
"""

from dataclasses import replace
from typing import Any

from ckdist.models import from_config, limits, rope
from ckdist.models.dots3_gguf import GGUF, NAMES, export, gguf, mixed_model
from ckdist.models.families import deepseek_v2, deepseek_v32, glm4_moe_lite
from ckdist.models.families.family import Fields
from ckdist.models.spec import ModelSpec, MoeFfn, RopeSpec

FULL, SPARSE, SLIDING = "full_attention", "indexed_attention", "sliding_attention"
SWA = {  # field of a sliding layer, with the prefix swa_ in published files -> its default
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
KEYS = glm4_moe_lite.KEYS.but(
    defaults={
        **deepseek_v32.INDEX, **{f"swa_{name}": size for name, size in SWA.items()}, "indexer_rope_interleave": True,
        "max_position_embeddings": 524288, "moe_shared_expert_intermediate_size": 1536, "num_experts_per_tok": 8,
        "q_lora_rank": 1024, "qk_nope_head_dim": 128, "rope_theta": 8e7, "routed_scaling_factor": 1.0,
        "sliding_window": 512, "swa_rope_theta": 5e4, "v_head_dim": 128,
    },
    aliases={
        "shared_experts_intermediate_size": "moe_shared_expert_intermediate_size",
        "sliding_window_size": "sliding_window",
    },
    only={
        "apply_mla_qkv_lora_rescale": True, "attention_gate_type": "headwise", "final_norm": "RMSNorm",
        "k_rope_only_layernorm": True, "moe_gating_fp32": False, "normalization": "RMSNorm", "qk_layernorm": True,
        "swa_attention_gate_type": "headwise", "use_dsa": True, "use_dynamic_rsf": False, "use_sliding_window": True,
    },
    unused=(
        *("audio_token_id", "moe_shared_expert_intermediate_size", "swa_head_dim", "swa_num_key_value_heads"),
        "swa_rope_theta",  # rope_parameters of newer files has it
    ),
)  # fmt: skip


def own_sizes(f: Fields, kinds: list[str]) -> dict[str, Any]:
    """Reads the sizes of sliding layers: `swa_` fields of published files, `per_layer_config` as transformers saves."""
    published = {name: f.integer(f"swa_{name}", high=limits.MAX_WIDTH) for name in SWA}
    saved = f.raw("per_layer_config")
    if saved is None:
        return published
    given = {int(layer): one for layer, one in saved.items() if layer.isdecimal()} if isinstance(saved, dict) else {}
    sliding = [i for i, kind in enumerate(kinds) if kind == SLIDING]
    one = given.get(sliding[0]) if sliding else {}
    if not isinstance(one, dict) or one.keys() - SWA or given != dict.fromkeys(sliding, one) or len(given) < len(saved):
        raise f.error("per_layer_config", str(saved)[:80], f"the same of {', '.join(SWA)} for each sliding layer")
    sizes = f.but(one)
    return {name: sizes.integer(name, high=limits.MAX_WIDTH) for name in SWA if name != "head_dim"}


def rotations(f: Fields, n: ModelSpec) -> dict[str, RopeSpec]:
    """Reads both rotations. As transformers saves them, they repeat their width as a fraction of a head."""
    given = f.sub("rope_parameters")
    nested = given.has(SPARSE) or given.has(SLIDING)
    found = {}
    for name, kind, theta in (("global", SPARSE, "rope_theta"), ("local", SLIDING, "swa_rope_theta")):
        one = given.sub(kind) if nested else given.but({"rope_theta": None} if name == "local" else {})
        one.raw("partial_rotary_factor")
        shape = rope.RopeShape(n.ropes["global"].dims, n.max_position, f.number(theta, low=1.0), interleaved=True)
        found[name] = rope.from_fields(one, shape, f)
    return found


def config(f: Fields, outer: Fields) -> ModelSpec:
    count = f.integer("num_hidden_layers", high=limits.MAX_LAYERS)
    usual = [SPARSE if i < 2 or i % 4 == 1 else SLIDING for i in range(count)]
    kinds = from_config.layer_kinds(f, count, (FULL, SPARSE, SLIDING)) or usual
    if FULL in kinds and f.raw("per_layer_config") is not None:  # of published files it means sparse attention
        raise f.error("layer_types", FULL, f"{SPARSE} or {SLIDING}")
    if outer is not f:
        for name in outer.values:  # transformers repeats published fields around the text part, and reads none of them
            outer.raw(name)
    spec = deepseek_v32.sparse_model(f, outer)
    size = f.integer("moe_shared_expert_intermediate_size", high=limits.MAX_FFN)
    shared = f.integer("n_shared_experts", low=1, high=limits.MAX_EXPERTS) * size
    ffns = [replace(x.ffn, shared_size=shared) if isinstance(x.ffn, MoeFfn) else x.ffn for x in spec.layers]
    spec = replace(spec.with_layers(ffn=ffns), ropes=rotations(f, spec))
    own, window = own_sizes(f, kinds), f.integer("sliding_window", high=limits.MAX_POSITION)
    if own["qk_rope_head_dim"] != (rotated := spec.ropes["global"].dims):
        raise f.error("swa_qk_rope_head_dim", own["qk_rope_head_dim"], f"{rotated}, as in the other layers")
    sizes = [own[name] for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")]
    return mixed_model(spec, [kind == SLIDING for kind in kinds], sizes, own["q_lora_rank"], window)


FAMILY = replace(
    deepseek_v32.FAMILY,
    gguf=GGUF,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=deepseek_v2.SAFETENSORS.but({}, (r".+\.self_attn\.(q|kv)_a_layernorm\.weight", "rank_scaled")),
    gguf_names=NAMES,
)
