"""Gemma 3n: alternating updates, a residual of low rank, per-layer embeddings, cut gates, caches that layers share."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import gemma2, gemma3, gemma4
from ckdist.models.families.family import Family, GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.residual_streams import AltUp
from ckdist.models.spec import Attention, DenseFfn, LayerInputs, ModelSpec

PERIOD = 5
KEYS = gemma3.KEYS.but(
    defaults={
        **sizes(hidden=2048, ffn=16384, layers=35, kv_heads=2, positions=32768, vocab=262400),
        "altup_num_inputs": 4, "attn_logit_softcapping": None, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 256, "laurel_rank": 64, "num_kv_shared_layers": 15,
        "query_pre_attn_scalar": None, "sliding_window": 512, "sliding_window_pattern": None,
        "vocab_size_per_layer_input": 262144,
    },
    only={"altup_active_idx": 0, "altup_correct_scale": True},
    unused=(
        *gemma4.KEYS.unused,
        *("altup_coef_clip", "altup_lr_multiplier"),  # of training
        *("audio_soft_tokens_per_image", "query_pre_attn_scalar", "sliding_window_pattern"),
    ),
)  # fmt: skip


def cuts(sparsity: list[float] | None, layers: int) -> list[float | None]:
    """The deviations at which gates are cut, from the share of zeros in each layer. None: as published."""
    shares = sparsity or [0.95 * (layers > 10 and i < 10) for i in range(layers)]
    return [float(np.float32(NormalDist().inv_cdf(share))) if share > 0 else None for share in shares]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    full = from_config.attention(f, n, scale=1.0, qk_norm="head", value_norm=True)
    slide = replace(full, window=from_config.window(f), rope="local")
    sliding = from_config.sliding_layers(f, n.num_layers, PERIOD)
    sizes = f.integers("intermediate_size", n.num_layers, limits.MAX_FFN)
    shares, function = "activation_sparsity_pattern", from_config.activation(f, "hidden_activation")
    cut = cuts(f.numbers(shares, n.num_layers, -1.0, 0.9999) if f.has(shares) else None, n.num_layers)
    ffns = [DenseFfn(size, function, deviations=own) for size, own in zip(sizes, cut, strict=True)]
    shared = f.integer("num_kv_shared_layers", low=0, high=n.num_layers)
    inputs = f.integer("hidden_size_per_layer_input", high=limits.MAX_WIDTH)
    return from_config.model(
        f, outer, n, gemma4.layers_of(f, full, slide, sliding, shared, ffns, scalar=False), gemma3.rotations(f, n),
        embedding_scale=math.sqrt(n.hidden_size),
        logit_soft_cap=gemma2.soft_cap(f, "final_logit_softcapping"),
        layer_inputs=LayerInputs(inputs, f.integer("vocab_size_per_layer_input", high=limits.MAX_VOCAB), function),
        altup=AltUp(f.integer("altup_num_inputs", low=2, high=8), f.integer("laurel_rank", high=limits.MAX_WIDTH)),
    )  # fmt: skip


def gguf(header: GgufHeader) -> ModelSpec:
    spec, f, name = gemma4.gguf(header, PERIOD), header.fields, "activation_sparsity_scale"
    if spec.layer_inputs is None:
        raise f.error("embedding_length_per_layer_input", 0, "at least 1")
    scales, cut = f.raw(name), cuts(None, len(spec.layers))
    if scales is not None:
        if not isinstance(scales, np.ndarray) or scales.shape != (len(cut),) or not np.all(scales < 100):
            raise f.error(name, scales, f"{len(cut)} numbers below 100")
        cut = [float(s) if s > -np.inf else None for s in scales]
    ffns = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, DenseFfn)]
    spec = spec.with_layers(ffn=[replace(ffn, deviations=own) for ffn, own in zip(ffns, cut, strict=True)])
    altup = AltUp(f.integer("altup.num_inputs", 4, low=2, high=8), header.rows("blk.0.laurel_l"))
    return replace(spec, altup=altup)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    if not spec.altup or spec.altup.streams != 4:
        raise ArchitectureError(f"{where}: a Gemma 3n with other than 4 streams has no GGUF form")
    cut = [layer.ffn.deviations for layer in spec.layers if isinstance(layer.ffn, DenseFfn)]
    more = {
        **gemma4.values(spec),
        "activation_sparsity_scale": [-np.inf if own is None else own for own in cut],
        "altup.active_idx": 0,
        "altup.num_inputs": spec.altup.streams,
    }
    unread = {}  # GGUF readers need keys and values of all layers, and do not compute those of shared caches
    for i, a in enumerate(spec.mixers(Attention)):
        if a.source is not None:
            zeros = np.zeros((a.num_kv_heads * a.head_dim, spec.hidden_size), np.float32)
            unread |= {f"blk.{i}.attn_k.weight": zeros, f"blk.{i}.attn_v.weight": zeros}
            unread[f"blk.{i}.attn_k_norm.weight"] = np.ones(a.head_dim, np.float32)
    form = to_gguf.dense("gemma3n", spec, where, more)
    return replace(form, vectors={**form.vectors, **unread})


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """The values of a weight in GGUF: small matrices, which the forward reads as vectors."""
    if weight.endswith("modality_router.weight"):
        return values.reshape(-1, spec.hidden_size)
    return values.reshape(-1, spec.altup.streams) if weight.endswith("_coefs.weight") and spec.altup else values


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    gguf_names=gemma4.FAMILY.gguf_names.but({
        "altup_proj": tuple(f"model.altup_projections.{i}" for i in range(3)),
        "altup_unembd_proj": tuple(f"model.altup_unembed_projections.{i}" for i in range(3)),
    }, (r"altup_(unembd_)?proj\.weight", "stack")).but_in_layers({
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }),
    ignored=(*gemma4.FAMILY.ignored, r"blk\.\d+\.attn_[kv](_norm)?\.weight"),  # of shared caches
    gguf_values=gguf_values,
)  # fmt: skip
