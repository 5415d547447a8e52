"""Chooses the files of a Hugging Face repository that make up a model. Works on names only."""

import re
from collections.abc import Sequence

from ckdist.errors import ConfigError
from ckdist.hub.folder_files import BESIDE, CONFIG

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # if none is requested, as in llama-server; else the first file
NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # GGUF files that are no models
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def choose_files(names: Sequence[str], wanted: str, repository: str) -> list[str]:
    """Returns the files to fetch: a GGUF file with its further parts, or config.json with a tokenizer and safetensors.

    Code and pickles are never fetched, nor are weights in subfolders of a safetensors repository.

    Args:
        wanted: A file, a quantization (Q4_K_M, in upper or lower case), or "".

    Raises:
        ConfigError: There is no such file.
    """
    names = sorted(name for name in names if _is_plain(name))
    models = gguf_models(names)
    if wanted.lower().endswith(".gguf"):
        found = [name for name in names if name.lower() == wanted.lower()]
    elif models:
        found = _by_quant(models, (wanted,) if wanted else DEFAULT_QUANTS) or ([] if wanted else models)
    elif not wanted and CONFIG in names and (weights := _weights(names)):
        return [*(name for name in (CONFIG, *BESIDE) if name in names), *weights]
    else:
        found = []
    if not found:
        raise ConfigError(_nothing(names, models, wanted, repository))
    return _parts(found[0], names, repository)


def gguf_models(names: Sequence[str]) -> list[str]:
    """Returns the GGUF files with weights of a language model. A split file is named by its first part."""
    return [name for name in names if _is_plain(name) and _is_model(name)]


def _is_plain(name: str) -> bool:
    """True if a file of this name may be requested and stored."""
    return (
        name.isprintable()
        and not name.startswith("/")
        and "\\" not in name
        and not any(part in ("", ".", "..") for part in name.split("/"))
    )


def _is_model(name: str) -> bool:
    """True if it is a GGUF file with weights of a language model, and not a further part of one."""
    split = SPLIT.search(name)
    file = name.rsplit("/", 1)[-1]
    return (
        name.lower().endswith(".gguf")
        and not any(word in file for word in NO_MODELS)
        and (not split or int(split[1]) == 1)
    )


def _by_quant(models: Sequence[str], quants: Sequence[str]) -> list[str]:
    """Returns the models of the first of `quants` that exists. `F16` does not match `BF16`."""
    for quant in quants:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[.-]", re.IGNORECASE)
        if found := [name for name in models if pattern.search(name)]:
            return found
    return []


def _parts(first: str, names: Sequence[str], repository: str) -> list[str]:
    """Returns a GGUF file with its further parts. Raises ConfigError if one is missing in `names`."""
    split = SPLIT.search(first)
    if split is None:
        return [first]
    parts = [f"{first[: split.start()]}-{i + 1:05d}-of-{split[2]}{first[-5:]}" for i in range(int(split[2]))]
    if missing := [name for name in parts if name not in names]:
        there = len(parts) - len(missing)
        raise ConfigError(f"{repository} has {there} of the {len(parts)} parts of {first}; {missing[0]} is missing")
    return parts


def _weights(names: Sequence[str]) -> list[str]:
    """Safetensors files in the root, except a second copy of the weights under other names."""
    return [
        name
        for name in names
        if name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")
    ]


def _nothing(names: Sequence[str], models: Sequence[str], wanted: str, repository: str) -> str:
    if models:
        shown = ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
        return f"{repository} has no {wanted}: there are {shown}"
    if wanted and CONFIG in names and _weights(names):
        return f"{repository} has no GGUF files, so no {wanted}: leave it out to load the safetensors files"
    return (
        f"{repository} has no GGUF files, and no config.json with safetensors: it is not a model that ckdist can read"
    )
