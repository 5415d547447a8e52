"""The known families: one file each in `families`, and those of other packages by entry points `ckdist.families`."""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import families
from ckdist.models.families.family import Family, GgufReader
from ckdist.models.fields import Fields
from ckdist.models.limits import checked
from ckdist.models.spec import ModelSpec

Vector: TypeAlias = Callable[[str], np.ndarray | None]
ENTRY_POINT = "ckdist.families"  # group of entry points; each names a Family
# Architectures and types whose text part is of the family that it names -> defaults of the whole file
SEVERAL_TEXT_PARTS: dict[Any, dict[str, Any]] = {
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings": True},
    "mistral3": {"tie_word_embeddings": True},
}
# Fields of GGUF that change no result, in most files
USUAL = frozenset(("expert_shared_count", "expert_shared_feed_forward_length", "feed_forward_length", "vocab_size"))


@functools.cache
def own_family(file: str) -> Family:
    """The family in a file of `families`, with its names."""
    names, _, base = families.NAMES[file].partition(" =")
    module = importlib.import_module(f"{families.__name__}.{'variants' if base else file}")
    made: Family = module.variant(file, own_family(base)) if base else module.FAMILY
    name, *words = names.split()
    types = [word for word in words if word[0].islower()]
    return replace(
        made,
        name=name,
        architectures=tuple(word for word in words if word[0].isupper()),
        model_types=(*types, name),
        gguf=next((word[1:] for word in words if word[0] == ":"), made.gguf or name),
    )


def own_families() -> dict[str, Family]:
    """All families of this package by their names."""
    return {one.name: one for one in map(own_family, families.NAMES)}


@functools.cache
def other_families() -> dict[str, Family]:
    """The families of other packages. They are loaded only if none of our families matches.

    Raises ArchitectureError if an entry point cannot be loaded, or if its family has the name of another one.
    """
    import importlib.metadata  # slow

    found: dict[str, Family] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT), key=lambda point: point.name):
        where = f"entry point {point.name} = {point.value} of {ENTRY_POINT}"
        try:
            made = point.load()
        except Exception as error:  # another package may raise anything; the user gets one line
            raise ArchitectureError(f"{where} cannot be loaded: {error!r:.200}") from error
        if not isinstance(made, Family) or not made.name:
            raise ArchitectureError(f"{where} is {type(made).__name__}; it must name a Family with a name")
        if made.name in own_families() or made.name in found:
            raise ArchitectureError(f"{where}: there is a family {made.name!r} already; give it another name")
        found[made.name] = made
    return found


def known_families() -> dict[str, Family]:
    """All families by name, those of other packages last. Raises the errors of `other_families`."""
    return own_families() | other_families()


def family(name: str) -> Family:
    """The family of this name. Raises ArchitectureError if it is not known."""
    return _find(name, lambda one: (one.name,), "the model")


CLASSIFIER = "ForSequenceClassification"
OTHER_GGUF = {"glm5next": "glm5-next"}  # architecture of another converter's files -> that of llama.cpp
Names: TypeAlias = Callable[[Family], Iterable[str]]


def _find(name: str, names_of: Names, where: str, read: Callable[[Family], list[str]] | None = None) -> Family:
    """The first family with `name` in `names_of(family)`.

    Raises ArchitectureError if there is none. `read` returns the fields of the file that a family does not have.
    """
    if (file := families.FILES.get(name)) and name in names_of(own := own_family(file)):
        return own
    if other := next((one for one in other_families().values() if name in names_of(one)), None):
        return other
    from ckdist.models.unknown_architecture import unknown_architecture

    raise unknown_architecture(name, {n: one for one in known_families().values() for n in names_of(one)}, where, read)


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Reads a config.json. Absent fields have the defaults of transformers.

    Raises ArchitectureError for an unknown family and ModelFileError for a wrong field. Both begin with `where`.
    """
    return read_config(config, where)[0]


def read_config(config: Mapping[str, Any], where: str) -> tuple[ModelSpec, list[str]]:
    """`spec_from_config`, and the unknown fields that may change results."""
    return _read(family_of_config(config, where), config, where)


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json. Raises ArchitectureError if it is not known, and ModelFileError for wrong names."""
    whole = Fields(config, where)
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise whole.error("architectures", names, "a list of names")
    if "=" in families.NAMES.get(str(config.get("model_type")), ""):
        names = None  # the architecture may be that of the family that it is
    name = names[0] if names else whole.text("model_type")
    if name.endswith(CLASSIFIER) and name not in families.FILES:  # of one label: a reward model
        name = name.replace(CLASSIFIER, "ForCausalLM")
    names_of: Names = (lambda one: one.architectures) if names else (lambda one: one.model_types)
    found = _find(name, names_of, where, lambda near: _read(near, config, where)[1])
    text = whole.sub("text_config")
    if name not in SEVERAL_TEXT_PARTS or not text.has("model_type"):
        return found
    return _find(text.text("model_type"), lambda one: one.model_types, f"{where}: text_config")


def _read(found: Family, config: Mapping[str, Any], where: str) -> tuple[ModelSpec, list[str]]:
    """`read_config` for a known family."""
    whole = Fields(config, where)
    if whole.has("text_config"):  # the language part of a multimodal model
        fields = found.keys.fields(whole.sub("text_config").values, where, "text_config.")
        name = (config.get("architectures") or [config.get("model_type")])[0]
        outer = replace(found.keys, defaults=SEVERAL_TEXT_PARTS.get(name, {})).fields(config, where)
    else:
        fields = outer = found.keys.fields(config, where)
    spec = checked(_named(found.from_config(fields, outer), found), where)
    unknown = found.keys.unknown(fields)
    return spec, unknown if outer is fields else [*unknown, *found.keys.unknown(outer)]


def _named(spec: ModelSpec, reader: Family) -> ModelSpec:
    """The model with the name of its family, which is that of its reader unless this named another one."""
    encoder = spec.encoder and replace(spec.encoder, family=reader.name)
    return replace(spec, family=spec.family or reader.name, encoder=encoder)


def read_gguf_metadata(
    metadata: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]], where: str, vector: Vector = lambda _: None
) -> tuple[ModelSpec, list[str]]:
    """Reads the metadata of a GGUF file.

    Args:
        metadata: The metadata of the file.
        dims: Dimensions of tensors by GGUF names, the contiguous dimension first.
        where: Beginning of error messages.
        vector: Name -> contents of a small float32 tensor, None if absent.

    Returns:
        The model, and the unknown fields that may change results.

    Raises:
        ArchitectureError: The family is not known.
        ModelFileError: A field is wrong.
    """
    from ckdist.models.from_gguf import GgufHeader

    name = Fields(metadata, where).text("general.architecture")
    found = _find(OTHER_GGUF.get(name, name), lambda one: (one.gguf,) if one.from_gguf else (), where)
    own = {key[len(name) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{name}.")}
    fields = Fields(own, where, f"{name}.")
    header, reader = GgufHeader(fields, dims, vector), found.from_gguf
    assert reader is not None
    spec = _named(header.uniform(reader) if isinstance(reader, GgufReader) else reader(header), found)
    if not spec.mixtures() and fields.integer("expert_count", 0, low=0):
        raise fields.error("expert_count", own["expert_count"], f"0: {spec.family} has no experts")
    unread = [key for _, key in fields.unread() if key not in USUAL]
    if unread:
        from ckdist.models.gguf_keys import unknown

        unread = unknown(fields, unread, spec)
    return checked(spec, where), unread
