"""VaultGemma: Gemma 2 without norms after a part."""

from dataclasses import replace

from ckdist.models.families import gemma2
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import ModelSpec, Norms


def config(f: Fields, outer: Fields) -> ModelSpec:
    spec = gemma2.config(f, outer)
    return spec.with_layers(norms=[Norms(before_ffn="pre_feedforward_layernorm")] * len(spec.layers))


FAMILY = replace(gemma2.FAMILY, from_config=config, from_gguf=None, to_gguf=GgufWriter(refused="serve its folder"))
