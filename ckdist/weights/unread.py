"""Tensors in a model's files that the forward does not read: notes on harmless ones, and an error for all others."""

import re
from collections.abc import Collection, Sequence

from ckdist.errors import ModelFileError
from ckdist.models.families.family import Family
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.tensor_source import StoredTensor

_HARMLESS = (  # pattern for names of both formats -> the feature that is missing
    (
        re.compile(
            r"(model\.)?(vi(sion|t)_\w+|visual|(multi_modal|mm)_projector|patch_merge_mlp|embed_vision)\..+|(v|mm)\..+"
        ),
        "images are not read",
    ),
    (re.compile(r"(model\.)?(audio_\w+|embed_audio)\..+|a\..+"), "audio is not read"),
    (re.compile(r".+\.[kv]_scale"), "the cache has a type of its own"),
    (
        re.compile(r"(language_model\.)?(model\.)?mtp(_\w+)?\..+"),
        "without --spec mtp, tokens are predicted one at a time",
    ),
)
_LAYER = re.compile(r"(?:blk|(?:model\.)?layers)\.(\d+)\..+")
_SHOWN = 3


def notes_on_unread(
    names: Collection[str], known: Family, layers: int, predicting_layers: int, where: str
) -> tuple[str, ...]:
    """A note for each kind of unread tensor that text generation does not need.

    Tensors in `known.ignored` get no note.

    Args:
        names: Tensors that nothing reads.
        known: The model's family.
        layers: Number of the model's layers.
        predicting_layers: Number of layers after these that predict further tokens.
        where: Beginning of the error message.

    Raises:
        ModelFileError: There is a tensor of another kind, so the answers would be wrong without it.
    """
    harmless: dict[str, list[str]] = {}
    unknown = []
    for name in names:
        missing = next((missing for pattern, missing in _HARMLESS if pattern.fullmatch(name)), None)
        layer = _LAYER.fullmatch(name)
        if layer and layers <= int(layer[1]) < layers + predicting_layers:
            missing = _HARMLESS[-1][1]
        if missing:
            harmless.setdefault(missing, []).append(name)
        elif not any(re.fullmatch(pattern, name) for pattern in known.ignored):
            unknown.append(name)
    if unknown:
        raise ModelFileError(
            f"{where}: {_shown(unknown)} in a {known.name} model of {layers} layers: "
            "the answers would be wrong without them; "
            "take a conversion of the model that has no such tensors"
        )
    return tuple(
        f"{missing}: {len(found)} tensors, as {found[0]!r}, stay unused" for missing, found in harmless.items()
    )


def notes_on_tensors(
    spec: ModelSpec, tensors: Sequence[StoredTensor], predicting_layers: int, where: str
) -> tuple[str, ...]:
    """The notes of `notes_on_unread`. Biases of zeros get none. Checks constants of hashes."""
    if n := getattr(spec.streams, "ngrams", None):
        from ckdist.weights.ngram_hashes import check_hashes

        check_hashes(n, tensors)
    names = [one.name for one in tensors if not is_zero_bias(one)]
    return notes_on_unread(names, family(spec.family), len(spec.layers), predicting_layers, where)


def is_zero_bias(tensor: StoredTensor) -> bool:
    """True if a tensor is a bias of zeros, which AutoGPTQ saves for every matrix."""
    if not tensor.name.endswith(".bias") or len(tensor.shape) != 1 or tensor.type < 0:
        return False
    return not read_tensor(tensor.source).any()


def _shown(names: Sequence[str]) -> str:
    first = ", ".join(f"{name!r:.100}" for name in names[:_SHOWN])
    if len(names) > _SHOWN:
        return f"{len(names)} tensors, {first} and {len(names) - _SHOWN} more, have no place"
    return f"{first} {'has' if len(names) == 1 else 'have'} no place"
