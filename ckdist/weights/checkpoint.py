"""A model on disk: its ModelSpec, and the file and offset of each weight by Hugging Face names. It loads no weights.

`open_checkpoint` takes a GGUF file (any part of a split one) or a folder with config.json and safetensors files. A
process imports only the reader of its model's format.
"""

import logging
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckdist.errors import ConfigError, ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.layout import Range
from ckdist.models.spec import ModelSpec
from ckdist.overrides import FLAG
from ckdist.weights.tensor_source import StoredTensor, TensorSource


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. With tied embeddings `lm_head.weight` is the same source as `model.embed_tokens.weight`."""

    path: pathlib.Path  # as the user gave it
    format: str  # gguf, safetensors
    spec: ModelSpec
    tensors: Mapping[str, TensorSource] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)  # GGUF metadata without the vocabulary, or config.json
    notes: tuple[str, ...] = ()  # parts of the files that are not used, one line each
    overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)  # values that replace the file's metadata
    unread: tuple[StoredTensor, ...] = field(default=(), repr=False)  # tensors that the forward does not read
    held: tuple[tuple[pathlib.Path, Range], ...] = ()  # file and bytes of small tensors that the spec holds

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the model's files."""
        return self.path if self.path.is_dir() else self.path.parent

    def warn(self, log: logging.Logger, silent: str | None = None) -> None:
        """Logs the notes, but none that begins with `silent`."""
        for note in self.notes if silent is None else (note for note in self.notes if not note.startswith(silent)):
            log.warning("%s: %s", self.path.name, note)


def open_checkpoint(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Opens the model at `path`: a GGUF file, or a folder with config.json and safetensors files.

    `overrides` replace metadata of a GGUF file.

    Raises:
        ModelFileError: It is not a model, a file is missing or damaged, a weight is missing or has the wrong shape, or
            the files hold weights that the model's family does not use.
        ArchitectureError: The family of the model is not known.
        ConfigError: An override cannot be applied.
    """
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            if overrides:
                raise ConfigError(
                    f"{FLAG} sets metadata of GGUF files, and {path} is a folder: "
                    "change its config.json, or give a GGUF file"
                )
            from ckdist.weights.folder_checkpoint import open_folder

            return open_folder(path)
        if path.exists() and not path.is_file():  # a pipe would block
            raise ModelFileError(f"{path} is neither a file nor a folder")
        with open_file(path) as file:
            magic = file.read(4)
    except (OSError, ValueError) as e:  # ValueError: a null byte in the path
        raise ModelFileError(f"{path} cannot be opened: {getattr(e, 'strerror', None) or e}") from None
    from ckdist.weights.gguf import MAGIC
    from ckdist.weights.gguf_checkpoint import open_gguf

    if magic != MAGIC:
        raise ModelFileError(
            f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}; for safetensors give the folder"
        )
    return open_gguf(path, overrides or {})
