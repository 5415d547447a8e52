"""nanochat: no norm has weights, embeddings and rotated heads are normed too, and the feed-forward has no gate.

Heads are rotated by negative angles. llama.cpp does not have the family, so it has no GGUF form.
"""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec

NAME = "nanochat"
KEYS = llama.KEYS.but(
    defaults={
        **sizes(hidden=768, ffn=8192, layers=12, heads=6, positions=2048, vocab=50304), "final_logit_softcapping": 15.0,
        "hidden_act": "relu2",
    },
    aliases=dict.fromkeys(("logits_soft_cap", "logit_softcap"), "final_logit_softcapping"),
    only={"window_pattern": "L"},
    nulls={"num_key_value_heads": None, "final_logit_softcapping": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    if (function := f.text("hidden_act")) != "relu2":
        raise f.error("hidden_act", function, "relu2: this family has no gates")
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    attention = n.attention(qkv_bias=bias, o_bias=bias, qk_norm="unit", norms_rotated=True)
    layer = LayerSpec(attention, DenseFfn(f.integer("intermediate_size", high=limits.MAX_FFN), "relu2", gated=False))
    ropes = {
        name: replace(rope, inverse_frequencies=-rope.inverse_frequencies)
        for name, rope in from_config.rotations(f, n).items()
    }
    cap = f.number("final_logit_softcapping", 0.0)
    return n.model(
        NAME, [layer] * n.num_layers, ropes, from_config.tied(f, outer),
        norm="unit", embedding_eps=n.norm_eps, logit_soft_cap=cap,
    )  # fmt: skip


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    to_gguf=GgufWriter(refused="llama.cpp does not have this family"),
    safetensors=family.SAFETENSORS.but_in_layers({"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}),
    gguf_names=family.GGUF,
)
