"""Golden families that together have every kind of layer, and every form of each of their fields. Tests of several
ranks run these. One rank runs all families, so every combination of fields.
"""

import pathlib
from collections.abc import Hashable
from dataclasses import fields, is_dataclass

from ckdist.weights.checkpoint import open_checkpoint
from tests.support.paths import GOLDEN

MODEL_FIELDS = ("tie_embeddings", "norm", "soft_cap", "logits_scale", "embedding_scale")


# As `chosen_families` has them, which opens every golden model. Each process of a run would do so as it collects tests.
NAMES = """
    cohere2 deepseek_v2 deepseek_v32 deepseek_v4 dots3_note falcon_h1 falcon_mamba gemma2 gemma3n gemma4_moe
    glm4 glm5_next gptoss granite4h_dense hy_v4 jais2 jamba kimi_k3 laguna lfm3 llama4 mimo_v2_flash
    minimax_m3 ministral3 mistral4 muse_glimmer nanochat nemotron_h nemotron_h_moe olmo_hybrid qwen4_exp
    step3p5
"""


TENSOR_ONLY = ("jamba", "falcon_mamba")  # states whose steps of time are made from the channels of all ranks


def prefill_of(path: pathlib.Path, prefill: str = "token") -> str:
    """`prefill`, or tensor-parallel if the family has no other form."""
    return "tensor" if path.name in TENSOR_ONLY else prefill


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
    forms = {("model", name, _form(getattr(spec, name, None))) for name in MODEL_FIELDS}
    return forms.union(*(_fields(layer, ()) for layer in spec.layers))


def _fields(value: object, path: tuple[str, ...]) -> set[Hashable]:
    """The form of each field of a record, and of the records in it, with the types of the records around it."""
    path = (*path, type(value).__name__)
    forms: set[Hashable] = {path}
    for field in fields(value):
        inner = getattr(value, field.name)
        forms |= _fields(inner, (*path, field.name)) if is_dataclass(inner) else {(*path, field.name, _form(inner))}
    return forms


def _form(value: object) -> Hashable:
    """A value without its sizes: whether a number is 0, and the types of arrays and records."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value != 0
    if isinstance(value, (tuple, list)):
        return tuple(sorted({_form(item) for item in value}, key=repr))
    return type(value).__name__
