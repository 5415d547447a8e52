"""Gemma 4: wider heads in full layers, caches that later layers share, per-layer embeddings, experts and an MLP."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.models import from_config, limits, rope
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family, gemma2
from ckdist.models.families.family import Family, Fields, GgufForm, GgufHeader
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, DenseFfn, Ffn, LayerInputs, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

PERIOD, THETA, LOCAL_THETA = 6, 1e6, 1e4
KEYS = ConfigKeys(
    {
        **sizes(hidden=2304, ffn=9216, layers=30, heads=8, kv_heads=4, head=256, positions=131072, vocab=262144),
        "final_logit_softcapping": None, "global_head_dim": 512, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256, "rms_norm_eps": 1e-6, "rope_theta": THETA, "sliding_window": 512,
        "tie_word_embeddings": True, "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": THETA},
        },
    },
    aliases={"top_k_experts": "num_experts_per_tok"},
    nulls={"final_logit_softcapping": None, "hidden_size_per_layer_input": 0},
    unused=(
        *("audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image"),
        "rope_theta",  # each kind of layer has its own
    ),
)  # fmt: skip


def layers_of(
    f: Fields,
    full: Attention,
    slide: Attention,
    sliding: list[bool],
    shared: int,
    ffns: Sequence[Ffn],
    scalar: bool = True,
) -> list[LayerSpec]:
    """The layers. The last `shared` ones read caches of earlier ones."""
    own, layers = len(sliding) - shared, []
    for i, slides in enumerate(sliding):
        source = None
        if i >= own:
            source = next((j for j in reversed(range(own)) if sliding[j] == slides), None)
            if source is None:
                raise f.error("num_kv_shared_layers", shared, "such that a layer of each kind has a cache of its own")
        layers.append(
            LayerSpec(replace(slide if slides else full, source=source), ffns[i], gemma2.NORMS, scalar=scalar)
        )
    return layers


def full_sizes(f: Fields, n: Sizes, sliding: list[bool]) -> tuple[int, int]:
    """(head_dim, kv-heads) of full layers: published files have fields, transformers saves `per_layer_config`."""
    eq, overrides = f.flag("attention_k_eq_v"), f.sub("per_layer_config")
    kv_heads = f.integer("num_global_key_value_heads", n.num_kv_heads, high=limits.MAX_HEADS) if eq else n.num_kv_heads
    width = f.integer("global_head_dim", high=limits.MAX_HEAD_DIM)
    names = {int(name): name for name in overrides.values if name.isdecimal() and len(name) < 6}  # "05", "11", ...
    if names:
        kv_heads, width = n.num_kv_heads, n.head_dim
    sizes = lambda own: (
        own.integer("head_dim", width, high=limits.MAX_HEAD_DIM),
        own.integer("num_key_value_heads", kv_heads, high=limits.MAX_HEADS),
    )
    found = {sizes(overrides.sub(names.get(i, ""))) for i, slides in enumerate(sliding) if not slides}
    if len(found) != 1:
        raise f.error("per_layer_config", f.raw("per_layer_config"), "the same for all full layers")
    return found.pop()


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    sliding = from_config.sliding_layers(f, n.num_layers, PERIOD)
    sliding[-1] = False  # as in transformers
    width, kv_heads = full_sizes(f, n, sliding)
    if (which := f.raw("use_bidirectional_attention")) not in (None, False, "vision"):
        raise f.error("use_bidirectional_attention", which, '"vision" or null')
    slide = from_config.attention(f, n, scale=1.0, qk_norm="head", value_norm=True)
    full = replace(slide, head_dim=width, num_kv_heads=kv_heads, keys_as_values=f.flag("attention_k_eq_v"))
    slide = replace(slide, window=from_config.window(f), rope="local")
    shared = f.integer("num_kv_shared_layers", 0, low=0, high=n.num_layers)
    dense = gemma2.dense(f)
    last = replace(dense, intermediate_size=2 * dense.intermediate_size) if f.flag("use_double_wide_mlp") else dense
    ffns = [dense if i < n.num_layers - shared else last for i in range(n.num_layers)]
    if f.flag("enable_moe_block"):
        moe = from_config.experts(f, "num_experts", "moe_intermediate_size", Routing(used=1), dense.activation)
        ffns = [of_experts(moe, dense)] * n.num_layers
    inputs = f.integer("hidden_size_per_layer_input", 0, low=0, high=limits.MAX_WIDTH)
    rows = f.integer("vocab_size_per_layer_input", n.vocab_size, high=limits.MAX_VOCAB)
    ropes = from_config.rotations(f, replace(n, head_dim=width))
    return from_config.model(
        f, outer, n, layers_of(f, full, slide, sliding, shared, ffns),
        {**ropes, "local": from_config.rotations(f, n).get("local", ropes["global"])},
        embedding_scale=math.sqrt(n.hidden_size),
        logit_soft_cap=gemma2.soft_cap(f, "final_logit_softcapping"),
        layer_inputs=LayerInputs(inputs, rows, dense.activation) if inputs else None,
    )  # fmt: skip


def of_experts(ffn: MoeFfn, dense: DenseFfn) -> MoeFfn:
    """`ffn`, and a dense feed-forward."""
    return replace(ffn, activation=dense.activation, share_factors=True, dense_size=dense.intermediate_size)


def gguf(header: GgufHeader, period: int = PERIOD) -> ModelSpec:
    """Reads GGUF metadata. `period`: of full layers, if the file does not name them."""
    f, layered = header.fields, ("attention.head_count_kv", "feed_forward_length")
    first = {name: v[0].item() for name in layered if isinstance(v := f.raw(name), np.ndarray) and v.size}
    header = header.but(first)
    n = header.sizes()
    sliding = header.sliding_layers(n.num_layers, period)
    last = sliding.index(False) if False in sliding else n.num_layers - 1
    kv_heads = [n.num_kv_heads] * n.num_layers
    if f.has(layered[0]):
        kv_heads = f.integers(layered[0], n.num_layers, limits.MAX_HEADS)
    ffns = [DenseFfn(size, "gelu_tanh") for size in f.integers(layered[1], n.num_layers, limits.MAX_FFN)]
    if header.is_mixture():
        mixture = header.experts(Routing(used=1))
        ffns = [of_experts(mixture, dense) for dense in ffns]
    width = f.integer("attention.key_length_swa", n.head_dim, high=limits.MAX_HEAD_DIM)
    full = replace(
        header.attention(n),
        scale=1.0, value_norm=True, num_kv_heads=kv_heads[last],
        keys_as_values=f"blk.{last}.attn_v.weight" not in header.dims,
    )  # fmt: skip
    slide = replace(
        full, head_dim=width, num_kv_heads=kv_heads[sliding.index(True) if True in sliding else 0],
        keys_as_values=False, window=f.integer("attention.sliding_window", low=0), rope="local",
    )  # fmt: skip
    shared = f.integer("attention.shared_kv_layers", 0, low=0, high=n.num_layers)
    inputs = f.integer("embedding_length_per_layer_input", 0, low=0, high=limits.MAX_WIDTH)
    return header.model(
        n,
        layers_of(f, full, slide, sliding, shared, ffns, header.has("layer_output_scale.weight")),
        {"global": header.rotation(n, THETA), "local": header.local_rotation(width, LOCAL_THETA)},
        embedding_scale=math.sqrt(n.hidden_size),
        logit_soft_cap=f.number("final_logit_softcapping", 0.0, high=1e6),
        layer_inputs=LayerInputs(inputs, header.rows("per_layer_token_embd")) if inputs else None,
    )


def values(spec: ModelSpec) -> dict[str, Any]:
    """GGUF metadata for layers that differ."""
    attentions, ffns = spec.mixers(Attention), [layer.ffn for layer in spec.layers]
    slide = next((a for a in attentions if a.window), attentions[-1])
    return {
        **gemma2.caps(spec),
        "attention.sliding_window": slide.window,
        "attention.sliding_window_pattern": [a.window > 0 for a in attentions],
        "attention.shared_kv_layers": sum(a.source is not None for a in attentions),
        "attention.head_count_kv": [a.num_kv_heads for a in attentions],
        "feed_forward_length": [
            ffn.dense_size if isinstance(ffn, MoeFfn) else ffn.intermediate_size for ffn in ffns if ffn is not None
        ],
        "embedding_length_per_layer_input": spec.layer_inputs.width if spec.layer_inputs else 0,
        "rope.freq_base_swa": float(spec.ropes["local"].theta),
    }


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    more, attentions = values(spec), spec.mixers(Attention)
    full = next(a for a in attentions if not a.window)
    slide = next((a for a in attentions if a.window), full)
    for suffix, a in (("", full), ("_swa", slide)):
        more |= {f"attention.{part}_length{suffix}": a.head_dim for part in ("key", "value")}
        more[f"rope.dimension_count{suffix}"] = a.head_dim
    if isinstance(spec.layers[0].ffn, MoeFfn):
        more |= to_gguf.experts(spec, where)
    rotation = spec.ropes["global"]  # GGUF divides frequencies that do not rotate by 1e30
    least = rope.plain(full.head_dim, rotation.theta).astype(np.float32) * np.float32(1e-30)
    rotation = replace(rotation, inverse_frequencies=np.maximum(rotation.inverse_frequencies, least))
    ropes = {**spec.ropes, "global": rotation}
    return to_gguf.dense("gemma4", replace(spec, ropes=ropes), where, more, factors=True)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but_in_layers(
        {
            "router.proj": "mlp.gate",
            "router.scale": "mlp.gate_norm.weight",
            "router.per_expert_scale": "mlp.gate.factors",
            **family.stacked("experts"),
        },
        family.STACKED_EXPERTS,
    ),
    gguf_names=family.GGUF_EXPERTS.but({
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }).but_in_layers({
        **family.POST_NORMS,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp.scale": "mlp.gate_norm.weight",
        "ffn_down_exps.scale": "mlp.gate.factors",
    }),
    ignored=(*family.ROTATIONS, r"model\.(language_model\.)?layers\.\d+\.self_attn\.(k|v)_(proj|norm)\.weight"),
)  # fmt: skip
