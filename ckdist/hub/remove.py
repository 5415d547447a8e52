"""Removes a fetched model from the store, or from the hub library's cache."""

import os
import pathlib
import re

from ckdist.errors import ConfigError
from ckdist.hub.store import store_folder


def remove_fetched(path: pathlib.Path) -> None:
    """Removes a model's files, the targets of links too. Raises ConfigError if one is not in a folder of models."""
    roots = [store_folder().resolve()]
    if "models--" in str(path):  # only then is the library installed
        from huggingface_hub import constants

        roots.append(pathlib.Path(constants.HF_HUB_CACHE).resolve())
    if path.is_dir():
        files = [file for file in path.iterdir() if not file.is_dir()]
    else:
        files = sorted(path.parent.glob(re.sub(r"-00001-of-(\d{5})\.gguf$", r"-?????-of-\1.gguf", path.name)))
        files += [path.with_suffix(".json")] if path.parent.resolve() == roots[0] else []
    for file in files:
        if not any(file.resolve().is_relative_to(root) for root in roots):
            raise ConfigError(f"{os.fspath(file)} is in no folder of fetched models, so it is kept")
    for file in files:
        file.resolve().unlink(missing_ok=True)
        file.unlink(missing_ok=True)
