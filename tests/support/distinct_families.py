"""Golden families whose layers together have every form: what a test of all layouts runs, in place of each family."""

import pathlib
from collections.abc import Hashable
from dataclasses import fields, is_dataclass

from ckdist.weights.checkpoint import open_checkpoint
from tests.support.paths import GOLDEN

MODEL_FIELDS = ("tie_embeddings", "norm", "soft_cap", "logits_scale", "embedding_scale")


# As `chosen_families` has them, which opens every golden model. Each process of a run would do so as it collects tests.
NAMES = """
    afmoe axk1 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v32 deepseek_v4 ernie4_5_moe exaone4 falcon_h1
    falcon_mamba gemma3n gemma4 gemma4_moe glm4 glm4moe glm_moe_dsa gptoss granite4h_dense granitemoe_swa
    hunyuan_v1_dense jais2 jamba kimi_linear laguna laguna_m lfm3 llama4 mellum mimo_v2_flash minimax_m3 ministral3
    mistral4 muse_glimmer nemotron_h nemotron_h_moe olmo3 olmo_hybrid qwen2moe qwen35moe step3p5 vaultgemma
"""


def distinct_families() -> tuple[pathlib.Path, ...]:
    """Folders of golden families that have each form of a mixer, of a feed-forward, of norms and of a model."""
    return tuple(GOLDEN / name for name in NAMES.split())


def chosen_families() -> list[str]:
    """The names, in order. Greedy: the family that adds the most forms is next."""
    forms = {path.parent: _forms(path.parent) for path in sorted(GOLDEN.glob("*/config.json"))}
    missing, chosen = set().union(*forms.values()), []
    while missing:
        chosen.append(max(forms, key=lambda folder: len(forms[folder] & missing)))
        missing -= forms[chosen[-1]]
    return sorted(folder.name for folder in chosen)


def _forms(folder: pathlib.Path) -> set[Hashable]:
    spec = open_checkpoint(folder).spec
    forms: set[Hashable] = {("model", *(_form(getattr(spec, name, None)) for name in MODEL_FIELDS))}
    for layer in spec.layers:
        forms |= {(field.name, _form(getattr(layer, field.name))) for field in fields(layer)}
    return forms


def _form(value: object) -> Hashable:
    """A value without its sizes: whether a number is 0, and the types of arrays."""
    if is_dataclass(value):
        return (type(value).__name__, *(_form(getattr(value, field.name)) for field in fields(value)))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value != 0
    if isinstance(value, (tuple, list)):
        return tuple(sorted({_form(item) for item in value}, key=repr))
    return type(value).__name__
