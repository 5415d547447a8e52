"""Arcee's AFM: Llama whose feed-forward has no gate, down(relu(up x)^2)."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama
from ckdist.models.families.family import Fields, GgufHeader, GgufReader, GgufWriter
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec

NAME = "arcee"
KEYS = llama.KEYS.but(
    defaults={
        **sizes(hidden=2560, ffn=18432, layers=32, heads=32, positions=4096, vocab=32000),
        "hidden_act": "relu2", "rms_norm_eps": 1e-5,
    },
    nulls={"num_key_value_heads": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    if (function := f.text("hidden_act")) != "relu2":
        raise f.error("hidden_act", function, "relu2: this family has no gates")
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    size = f.integer("intermediate_size", high=limits.MAX_FFN)
    layer = LayerSpec(n.attention(qkv_bias=bias, o_bias=bias), DenseFfn(size, "relu2", f.flag("mlp_bias"), gated=False))
    return n.model(NAME, [layer] * n.num_layers, from_config.rotations(f, n), from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    spec = from_gguf.uniform(GgufReader(), header)
    ffn = DenseFfn(from_gguf.ffn_size(header), "relu2", from_gguf.has(header, "ffn_up.bias"), gated=False)
    return replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer in spec.layers))


FAMILY = replace(
    llama.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(rotated=True, factors=True),
    gguf_names=family.GGUF.but({}, family.INTERLEAVED),
)
