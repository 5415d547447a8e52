"""EmbeddingGemma: Gemma 3 whose tokens attend to later ones too. Windows extend to both sides.

Two dense layers without a function between them follow the mean of all tokens: `ModelSpec.projections`.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from ckdist.models.families import gemma3
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, ModelSpec

DENSE = ("dense_2", "dense_3")  # in GGUF files


def bidirectional(spec: ModelSpec) -> ModelSpec:
    """The model whose tokens attend to both sides. `spec` has the windows of the file: both sides together."""
    mixers = spec.mixers(Attention)
    windows = [mixer.window and mixer.window // 2 + 1 for mixer in mixers]
    both = zip(mixers, windows, strict=True)
    return spec.with_layers(mixer=[replace(mixer, bidirectional=True, window=window) for mixer, window in both])


def config(f: Fields, outer: Fields) -> ModelSpec:
    spec = gemma3.config(f, outer)
    return bidirectional(spec) if f.flag("use_bidirectional_attention") else spec


def gguf(header: GgufHeader) -> ModelSpec:
    spec = bidirectional(gemma3.gguf(header))
    dims = (header.dims.get(f"{name}.weight", ()) for name in DENSE)
    return replace(spec, projections=tuple(rows[1] for rows in dims if len(rows) > 1))


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    window = max(mixer.window for mixer in spec.mixers(Attention))
    own = {"attention.sliding_window": 2 * (window - 1), "attention.causal": False, "pooling_type": 1}
    rows = pairwise([spec.hidden_size, *spec.projections])
    for name, (inputs, outputs) in zip(DENSE, rows, strict=False):
        own |= {f"{name}_feat_in": inputs, f"{name}_feat_out": outputs}
    return {**gemma3.written(spec, where), **own}


FAMILY = replace(
    gemma3.FAMILY,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written),
    gguf_names=gemma3.FAMILY.gguf_names.but({name: f"model.projection_{i}" for i, name in enumerate(DENSE)}),
)
