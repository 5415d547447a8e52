"""Muse Glimmer, the text part: normed embeddings, gates after attention, queries and keys of length one.

Full layers do not rotate. Norms after a part have an epsilon of their own. GGUF files have the factor of queries as the
weights of their norm.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import exaone4, family, gemma2, granite_swa
from ckdist.models.families.family import Family, Fields, GgufForm, GgufHeader
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec

PERIOD, POST_EPS = 4, 1e-8
KEYS = ConfigKeys(
    {
        **sizes(hidden=6656, ffn=19968, layers=52, heads=32, kv_heads=2, head=128, positions=131072, vocab=202048),
        "final_logit_softcapping": 20.0, "hidden_activation": "silu", "output_multiplier": 0.19611613513818404,
        "post_norm_eps": POST_EPS, "qk_scale_factor": 3.87, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "sliding_window": 2048,
    },
    nulls={"sliding_window": None},
    only={"attn_logit_softcapping": None},
    unused=("hidden_act", "out_hidden_size", "projector_hidden_size"),
)  # fmt: skip


def layers(
    attention: Attention, window: int, full: list[bool], rotates: list[bool], ffn: DenseFfn, eps: float
) -> list[LayerSpec]:
    """Makes the layers. `eps`: of the norms after a part."""
    norms = replace(gemma2.NORMS, after_eps=eps)
    mixers = [
        replace(attention, window=0 if is_full else window, rope="global" if turns else None)
        for is_full, turns in zip(full, rotates, strict=True)
    ]
    return [LayerSpec(mixer, ffn, norms) for mixer in mixers]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    scale = n.head_dim**-0.5 * f.number("qk_scale_factor", high=1e6)
    attention = n.attention(scale, qk_norm="unit", gated="sigmoid")
    usual = [(n.num_layers - 1 - i) % PERIOD != 0 for i in range(n.num_layers)]
    full = [not slides for slides in from_config.sliding_layers(f, n.num_layers, usual)]
    rotated, eps = granite_swa.rotated_layers(f, n.num_layers, usual), f.number("post_norm_eps")
    made = layers(attention, from_config.window(f), full, rotated, gemma2.dense(f), eps)
    scale, cap = f.number("output_multiplier", high=1e6), gemma2.soft_cap(f, "final_logit_softcapping")
    more = {"embedding_eps": n.norm_eps, "logit_scale": scale, "logit_soft_cap": cap}
    return from_config.model(f, outer, n, made, **more)


def gguf(header: GgufHeader) -> ModelSpec:
    f, n = header.fields, header.sizes()
    sliding = header.sliding_layers(n.num_layers, PERIOD)
    window = f.integer("attention.sliding_window", low=0, high=1 << 30)
    attention = replace(header.attention(n), gated="sigmoid")
    made = layers(attention, window, [not s for s in sliding], sliding, header.dense(), POST_EPS)
    scale, cap = f.number("logit_scale", high=1e6), f.number("final_logit_softcapping", 0.0, high=1e6)
    more = {"embedding_eps": n.norm_eps, "logit_scale": scale, "logit_soft_cap": cap}
    return header.model(n, made, **more)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError for a form that llama.cpp does not have."""
    from ckdist.models import to_gguf

    mixers = spec.mixers(Attention)
    if any(bool(a.window) != bool(a.rope) for a in mixers) or spec.layers[0].norms.after_eps != POST_EPS:
        needs = f"sliding layers rotate, with {POST_EPS} after parts"
        raise ArchitectureError(f"{where}: {spec.family} has no GGUF form unless {needs}")
    own = {"logit_scale": float(spec.logit_scale), "final_logit_softcapping": float(spec.logit_soft_cap)}
    made = to_gguf.dense("muse-glimmer", spec, where, {**own, **exaone4.written(spec, where)})
    width = mixers[0].head_dim
    norms = {"q": np.full(width, mixers[0].scale * width**0.5, np.float32), "k": np.ones(width, np.float32)}
    of_layers = {f"blk.{i}.attn_{name}_norm.weight": one for i in range(len(mixers)) for name, one in norms.items()}
    return replace(made, vectors={**made.vectors, **of_layers})


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but({}, (r".*layernorm\.weight", "plus_one")),
    gguf_names=family.GGUF_POST_NORMS.but_in_layers({"attn_gate": "self_attn.gate_proj"}, family.INTERLEAVED),
)
