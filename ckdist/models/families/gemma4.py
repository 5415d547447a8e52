"""Gemma 4: wider heads in full layers, caches that later layers share, per-layer embeddings, experts and an MLP."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.models import from_config, limits, rope
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family, gemma2
from ckdist.models.families.family import Family, Fields, GgufForm, GgufHeader
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, DenseFfn, LayerInputs, LayerSpec, ModelSpec, MoeFfn, RopeSpec
from ckdist.program.routing import Routing

NAME = "gemma4"
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
    nulls={"final_logit_softcapping": None, "hidden_size_per_layer_input": 0},
    unused=(
        *("audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image"),
        "rope_theta",  # each kind of layer has its own
    ),
)  # fmt: skip


def spec_of(
    n: Sizes, full: Attention, slide: Attention, sliding: list[bool], shared: int, ffn: Any, f: Fields, **more: Any
) -> ModelSpec:
    """The model whose last `shared` layers read caches. `ffn(i)` is the feed-forward of layer i."""
    own, layers = n.num_layers - shared, []
    for i, slides in enumerate(sliding):
        source = None
        if i >= own:
            source = next((j for j in reversed(range(own)) if sliding[j] == slides), None)
            if source is None:
                raise f.error("num_kv_shared_layers", shared, "such that a layer of each kind has a cache of its own")
        mixer = replace(slide if slides else full, source=source)
        layers.append(LayerSpec(mixer, ffn(i), gemma2.NORMS, scalar=more.get("scalar", True)))
    more.pop("scalar", None)
    return n.model(NAME, layers, embedding_scale=math.sqrt(n.hidden_size), **more)


def full_sizes(f: Fields, n: Sizes, sliding: list[bool]) -> tuple[int, int]:
    """(head_dim, kv-heads) of full layers: published files have fields, transformers saves `per_layer_config`."""
    eq, overrides = f.flag("attention_k_eq_v"), f.sub("per_layer_config")
    kv_heads = f.integer("num_global_key_value_heads", n.num_kv_heads, high=limits.MAX_HEADS) if eq else n.num_kv_heads
    width = f.integer("global_head_dim", high=limits.MAX_HEAD_DIM)
    names = {int(name): name for name in overrides.values if name.isdecimal() and len(name) < 6}  # "05", "11", ...
    if names:
        kv_heads, width = n.num_kv_heads, n.head_dim
    found = {
        (
            own.integer("head_dim", width, high=limits.MAX_HEAD_DIM),
            own.integer("num_key_value_heads", kv_heads, high=limits.MAX_HEADS),
        )
        for own in (overrides.sub(names.get(i, "")) for i, slides in enumerate(sliding) if not slides)
    }
    if len(found) != 1:
        raise f.error("per_layer_config", f.raw("per_layer_config"), "the same for all full layers")
    return found.pop()


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    sliding = from_config.sliding_layers(f, n.num_layers, PERIOD)
    sliding[-1] = False  # as in transformers
    width, kv_heads = full_sizes(f, n, sliding)
    if (which := f.raw("use_bidirectional_attention")) not in (None, False, "vision"):
        raise f.error("use_bidirectional_attention", which, '"vision" or null')
    bias = f.flag("attention_bias")
    slide = n.attention(1.0, qk_norm="head", value_norm=True, qkv_bias=bias, o_bias=bias)
    full = replace(slide, head_dim=width, num_kv_heads=kv_heads, keys_as_values=f.flag("attention_k_eq_v"))
    slide = replace(slide, window=from_config.window(f), rope="local")
    shared = f.integer("num_kv_shared_layers", 0, low=0, high=n.num_layers)
    dense = from_config.dense(f, from_config.activation(f, "hidden_activation"))
    last = replace(dense, intermediate_size=2 * dense.intermediate_size) if f.flag("use_double_wide_mlp") else dense
    mixture = None
    if f.flag("enable_moe_block"):
        routing = Routing(used=f.integer("top_k_experts", high=limits.MAX_EXPERTS))
        size = f.integer("moe_intermediate_size", high=limits.MAX_FFN)
        count = f.integer("num_experts", high=limits.MAX_EXPERTS)
        mixture = of_experts(MoeFfn(count, size, routing), dense)
    inputs = f.integer("hidden_size_per_layer_input", 0, low=0, high=limits.MAX_WIDTH)
    rows = f.integer("vocab_size_per_layer_input", n.vocab_size, high=limits.MAX_VOCAB)
    ropes = from_config.rotations(f, replace(n, head_dim=width))
    return spec_of(
        n, full, slide, sliding, shared, lambda i: mixture or (dense if i < n.num_layers - shared else last), f,
        ropes={**ropes, "local": from_config.rotations(f, n).get("local", ropes["global"])},
        tied=from_config.tied(f, outer),
        logit_soft_cap=gemma2.soft_cap(f, "final_logit_softcapping"),
        layer_inputs=LayerInputs(inputs, rows, dense.activation) if inputs else None,
    )  # fmt: skip


def of_experts(ffn: MoeFfn, dense: DenseFfn) -> MoeFfn:
    """`ffn`, and a dense feed-forward."""
    return replace(ffn, activation=dense.activation, share_factors=True, dense_size=dense.intermediate_size)


def gguf(header: GgufHeader, period: int = PERIOD) -> ModelSpec:
    """Reads GGUF metadata. `period`: of full layers, if the file does not name them."""
    from ckdist.models import from_gguf

    f, layered = header.fields, ("attention.head_count_kv", "feed_forward_length")
    first = {name: v[0].item() for name in layered if isinstance(v := f.raw(name), np.ndarray) and v.size}
    header = replace(header, fields=f.but(first))
    n = from_gguf.sizes(header)
    sliding = from_gguf.sliding_layers(f, n.num_layers, period)
    last = sliding.index(False) if False in sliding else n.num_layers - 1
    kv_heads = [n.num_kv_heads] * n.num_layers
    if f.has(layered[0]):
        kv_heads = f.integers(layered[0], n.num_layers, limits.MAX_HEADS)
    sizes = f.integers(layered[1], n.num_layers, limits.MAX_FFN)
    width = f.integer("attention.key_length_swa", n.head_dim, high=limits.MAX_HEAD_DIM)
    full = replace(
        from_gguf.attention(header, n),
        scale=1.0, value_norm=True, num_kv_heads=kv_heads[last],
        keys_as_values=f"blk.{last}.attn_v.weight" not in header.dims,
    )  # fmt: skip
    slide = replace(
        full, head_dim=width, num_kv_heads=kv_heads[sliding.index(True) if True in sliding else 0],
        keys_as_values=False, window=f.integer("attention.sliding_window", low=0), rope="local",
    )  # fmt: skip
    mixture = from_gguf.experts(header, Routing(used=1)) if from_gguf.is_mixture(header) else None
    dense = lambda i: DenseFfn(sizes[i], "gelu_tanh")
    inputs = f.integer("embedding_length_per_layer_input", 0, low=0, high=limits.MAX_WIDTH)
    local = f.number("rope.freq_base_swa", LOCAL_THETA, low=1.0)
    return spec_of(
        n, full, slide, sliding, f.integer("attention.shared_kv_layers", 0, low=0, high=n.num_layers),
        lambda i: of_experts(mixture, dense(i)) if mixture else dense(i), f,
        ropes={
            "global": from_gguf.rotation(header, n, THETA),
            "local": RopeSpec(rope.plain(width, local).astype(np.float32), theta=local),
        },
        tied=from_gguf.tied(header),
        scalar=from_gguf.has(header, "layer_output_scale.weight"),
        logit_soft_cap=f.number("final_logit_softcapping", 0.0, high=1e6),
        layer_inputs=LayerInputs(inputs, from_gguf.rows(header, "per_layer_token_embd")) if inputs else None,
    )  # fmt: skip


def values(spec: ModelSpec) -> dict[str, Any]:
    """GGUF metadata for layers that differ."""
    attentions = [layer.attention for layer in spec.layers]
    slide = next((a for a in attentions if a.window), attentions[-1])
    return {
        **gemma2.caps(spec),
        "attention.sliding_window": slide.window,
        "attention.sliding_window_pattern": [a.window > 0 for a in attentions],
        "attention.shared_kv_layers": sum(a.source is not None for a in attentions),
        "attention.head_count_kv": [a.num_kv_heads for a in attentions],
        "feed_forward_length": [
            layer.ffn.dense_size if isinstance(layer.ffn, MoeFfn) else layer.ffn.intermediate_size
            for layer in spec.layers
            if layer.ffn is not None
        ],
        "embedding_length_per_layer_input": spec.layer_inputs.width if spec.layer_inputs else 0,
        "rope.freq_base_swa": float(spec.ropes["local"].theta),
    }


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    more, attentions = values(spec), [layer.attention for layer in spec.layers]
    full = next(a for a in attentions if not a.window)
    slide = next((a for a in attentions if a.window), full)
    for suffix, a in (("", full), ("_swa", slide)):
        more |= {f"attention.{part}_length{suffix}": a.head_dim for part in ("key", "value")}
        more[f"rope.dimension_count{suffix}"] = a.head_dim
    if isinstance(spec.layers[0].ffn, MoeFfn):
        more |= to_gguf.experts(spec, where)
    rotation = spec.ropes["global"]  # GGUF divides frequencies that do not rotate by 1e30
    least = rope.plain(full.head_dim, rotation.theta).astype(np.float32) * np.float32(1e-30)
    ropes = {
        **spec.ropes,
        "global": replace(rotation, inverse_frequencies=np.maximum(rotation.inverse_frequencies, least)),
    }
    return to_gguf.dense(NAME, replace(spec, ropes=ropes), where, more, factors=True)


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
            "experts.gate_up_proj": (family.GATE, family.UP),
            "experts.down_proj": "mlp.experts.down_proj",
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
