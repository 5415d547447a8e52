"""Tensors in a model's files that the forward does not read: which of them change no answer, and the error for all
others.
"""

import re
from collections.abc import Collection, Sequence

from ckdist.errors import ModelFileError
from ckdist.models.families.family import Family

_BESIDE = (  # in names of either format, and what is not done without them
    (
        re.compile(r"(model\.)?(vision_\w+|visual|multi_modal_projector|mm_projector|embed_vision)\..+|(v|mm)\..+"),
        "images are not read",
    ),
    (re.compile(r"(model\.)?(audio_\w+|embed_audio)\..+|a\..+"), "sound is not heard"),
    (re.compile(r"(model\.)?mtp(_\w+)?\..+"), "tokens are predicted one at a time"),
)
_LAYER = re.compile(r"(?:blk|(?:model\.)?layers)\.(\d+)\..+")
_SHOWN = 3


def notes_on_unread(
    names: Collection[str], family: Family, layers: int, predicting_layers: int, where: str
) -> tuple[str, ...]:
    """A line for each kind of tensors among `names`, which nothing reads, that a text does not need; none for those
    that the family's file names.

    `predicting_layers`: how many layers behind the model's `layers` predict further tokens. ModelFileError, which
    begins with `where`, when there are tensors of another kind, since without them the answers would be wrong.
    """
    beside: dict[str, list[str]] = {}
    unknown = []
    for name in names:
        what = next((what for pattern, what in _BESIDE if pattern.fullmatch(name)), None)
        layer = _LAYER.fullmatch(name)
        if layer and layers <= int(layer[1]) < layers + predicting_layers:
            what = _BESIDE[-1][1]
        if what:
            beside.setdefault(what, []).append(name)
        elif not any(re.fullmatch(pattern, name) for pattern in family.ignored):
            unknown.append(name)
    if unknown:
        raise ModelFileError(
            f"{where}: {_shown(unknown)} in a {family.name} model of {layers} layers: "
            "without what the file computes with them its answers would be wrong; "
            "take a conversion of the model that has no such tensors"
        )
    return tuple(f"{what}: {len(found)} tensors, as {found[0]!r}, stay unused" for what, found in beside.items())


def _shown(names: Sequence[str]) -> str:
    first = ", ".join(f"{name!r:.100}" for name in names[:_SHOWN])
    if len(names) > _SHOWN:
        return f"{len(names)} tensors, {first} and {len(names) - _SHOWN} more, have no place"
    return f"{first} {'has' if len(names) == 1 else 'have'} no place"
