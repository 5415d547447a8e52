"""LFM3: LFM2 with sliding layers, gates of heads, and norms before and after each part."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import lfm2
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec, Norms
from ckdist.models.state_mixers import GatedConv

CONV, FULL, SLIDING = KINDS = ("conv", "full_attention", "sliding_attention")
KEYS = lfm2.KEYS.but(
    defaults={
        **sizes(hidden=2048, ffn=7680, layers=24, heads=16, kv_heads=4, head=128, vocab=128000),
        **dict.fromkeys(("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")),
        "conv_L_cache": 7, "sliding_window": 256, "use_attention_gate": True, "use_sandwich_norm": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    aliases={"rms_norm_eps": "norm_eps"},
    unused=("rope_theta",),  # each kind of layer has its own
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f, "norm_eps")
    usual = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(n.num_layers)]
    kinds = from_config.layer_kinds(f, n.num_layers, KINDS) or usual
    gated = f.flag("use_attention_gate")
    full = n.attention(qk_norm="head", gated="sigmoid" if gated else "", head_gates=gated)
    mixers = {
        FULL: full,
        SLIDING: replace(full, rope="local", window=from_config.window(f)),
        CONV: GatedConv(n.hidden_size, f.integer("conv_L_cache", low=2, high=limits.MAX_CONV), f.flag("conv_bias")),
    }
    after = ("post_mixer_layernorm", "post_feedforward_layernorm") if f.flag("use_sandwich_norm") else (None, None)
    norms, ffn = (
        Norms(after_mixer=after[0], after_ffn=after[1]),
        DenseFfn(f.integer("intermediate_size", high=limits.MAX_WIDTH)),
    )
    layers = [LayerSpec(mixers[kind], ffn, norms) for kind in kinds]
    return from_config.model(f, outer, n, layers)


FAMILY = replace(
    lfm2.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=None,
    to_gguf=GgufWriter(refused="its architecture has none"),
    safetensors=lfm2.FAMILY.safetensors.but_in_layers({
        "self_attn.g_proj": "self_attn.gate_proj",
        "post_operator_norm": "post_mixer_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    }),
)  # fmt: skip
