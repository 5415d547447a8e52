"""OLMo 3: OLMo 2 with windows. Layers with a window have a plain rotation, the others YaRN."""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, rope
from ckdist.models.families import olmo2
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

PERIOD = 4
KEYS = olmo2.KEYS.but(defaults={"rope_theta": 500000.0, "sliding_window": 4096}, nulls={"sliding_window": None})


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    full, window = from_config.attention(f, n, qk_norm="row"), from_config.window(f)
    ropes = from_config.rotations(f, n)
    ropes.setdefault("local", rope.unscaled(n.head_dim, f.number("rope_theta", low=1.0)))
    sliding = from_config.sliding_layers(f, n.num_layers, PERIOD)
    slide, ffn = replace(full, window=window, rope="local"), from_config.dense(f)
    return from_config.model(
        f, outer, n, [LayerSpec(slide if slides else full, ffn, olmo2.NORMS) for slides in sliding], ropes
    )


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError if the pattern of windows is not the usual one."""
    sliding = [layer.attention.rope == "local" for layer in spec.layers]
    window = max(layer.attention.window for layer in spec.layers)
    if sliding != from_config.periodic(len(sliding), PERIOD) or not window:
        raise ArchitectureError(f"{where}: OLMo 3 has no GGUF form unless all but every {PERIOD}th layer have a window")
    if spec.ropes["local"].theta != spec.ropes["global"].theta:
        raise ArchitectureError(f"{where}: an OLMo 3 whose rotations have two bases has no GGUF form")
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": sliding}


FAMILY = Family(
    keys=KEYS, gguf="olmo2", from_config=config, to_gguf=GgufWriter(written), gguf_names=olmo2.FAMILY.gguf_names
)
