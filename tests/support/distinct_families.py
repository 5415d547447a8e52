"""Golden families whose layers together have every form: what a test of all layouts runs, in place of each family."""

import functools
import pathlib
from collections.abc import Hashable
from dataclasses import fields, is_dataclass

from ckdist.weights.checkpoint import open_checkpoint
from tests.support.paths import GOLDEN

MODEL_FIELDS = ("tie_embeddings", "norm", "soft_cap", "logits_scale", "embedding_scale")


@functools.cache
def distinct_families() -> tuple[pathlib.Path, ...]:
    """Folders of golden families. Each form of a mixer, of a feed-forward, of norms and of a model is in one of them.

    Greedy: the family that adds the most forms is next.
    """
    forms = {path.parent: _forms(path.parent) for path in sorted(GOLDEN.glob("*/config.json"))}
    missing, chosen = set().union(*forms.values()), []
    while missing:
        chosen.append(max(forms, key=lambda folder: len(forms[folder] & missing)))
        missing -= forms[chosen[-1]]
    return tuple(sorted(chosen))


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
