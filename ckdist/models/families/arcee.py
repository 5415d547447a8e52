"""Arcee's AFM: Llama whose feed-forward has no gate, down(relu(up x)^2)."""

from dataclasses import replace
from typing import Any

from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={
        **sizes(hidden=2560, ffn=18432, layers=32, heads=32, positions=4096, vocab=32000),
        "hidden_act": "relu2", "rms_norm_eps": 1e-5,
    },
    nulls={"num_key_value_heads": None},
    only={"hidden_act": "relu2"},  # there are no gates
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    ffn = DenseFfn(f.integer("intermediate_size", high=limits.MAX_FFN), "relu2", f.flag("mlp_bias"), gated=False)
    return from_config.model(f, outer, n, [LayerSpec(from_config.attention(f, n), ffn)] * n.num_layers)


def gguf(header: GgufHeader, epsilon: str = "attention.layer_norm_rms_epsilon", **more: Any) -> ModelSpec:
    """Reads GGUF metadata. `epsilon` is the name of its field, `more` are further fields of ModelSpec."""
    n = header.sizes(epsilon)
    ffn = DenseFfn(header.ffn_size(), "relu2", header.has("ffn_up.bias"), gated=False)
    return header.model(n, [LayerSpec(header.attention(n), ffn)] * n.num_layers, **more)


FAMILY = replace(
    llama.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(rotated=True, factors=True),
    gguf_names=family.GGUF.but({}, family.INTERLEAVED),
)
