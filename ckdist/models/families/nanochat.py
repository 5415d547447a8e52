"""nanochat: no norm has weights, embeddings and rotated heads are normed too, and the feed-forward has no gate.

Heads are rotated by negative angles. llama.cpp does not have the family, so it has no GGUF form.
"""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={
        **sizes(hidden=768, ffn=8192, layers=12, heads=6, positions=2048, vocab=50304), "final_logit_softcapping": 15.0,
        "hidden_act": "relu2",
    },
    aliases=dict.fromkeys(("logits_soft_cap", "logit_softcap"), "final_logit_softcapping"),
    only={"hidden_act": "relu2", "window_pattern": "L"},
    nulls={"num_key_value_heads": None, "final_logit_softcapping": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = from_config.attention(f, n, qk_norm="unit", norms_rotated=True)
    layer = LayerSpec(attention, DenseFfn(f.integer("intermediate_size", high=limits.MAX_FFN), "relu2", gated=False))
    ropes = {
        name: replace(rope, inverse_frequencies=-rope.inverse_frequencies)
        for name, rope in from_config.rotations(f, n).items()
    }
    more = {"embedding_eps": n.norm_eps, "logit_soft_cap": f.number("final_logit_softcapping", 0.0)}
    return from_config.model(f, outer, n, [layer] * n.num_layers, ropes, norm="unit", **more)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    to_gguf=GgufWriter(refused="llama.cpp does not have this family"),
    safetensors=family.SAFETENSORS.but_in_layers({"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}),
    gguf_names=family.GGUF,
)
