"""CWM: Llama with windows in three of four layers. All layers have one rotation."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import llama
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import Attention, ModelSpec

PERIOD = 4  # the first layer of each period has no window
KEYS = llama.KEYS.but(
    defaults={
        **sizes(hidden=6144, ffn=21504, layers=64, heads=48, kv_heads=8, head=128, positions=131072, vocab=128256),
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 1e6, "sliding_window": 8192,
    },
    only={"window_pattern": PERIOD, "global_window": None, "mlp_bias": False},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    spec, window = llama.config(f, outer), from_config.window(f)
    sliding = from_config.sliding_layers(f, len(spec.layers), [i % PERIOD != 0 for i in range(len(spec.layers))])
    mixers = zip(spec.mixers(Attention), sliding, strict=True)
    return spec.with_layers(mixer=[replace(mixer, window=window * slides) for mixer, slides in mixers])


FAMILY = replace(
    llama.FAMILY, keys=KEYS, from_config=config, from_gguf=None, to_gguf=GgufWriter(refused="serve its folder")
)
