"""Dense layers after the pooling of embeddings, as sentence-transformers stores them: folders 2_Dense, 3_Dense."""

import pathlib
import re
from dataclasses import dataclass

from ckdist.errors import ModelFileError
from ckdist.hub.folder_files import CONFIG, SINGLE_FILE
from ckdist.models.fields import Fields
from ckdist.models.limits import MAX_WIDTH
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import StoredTensor, read_safetensors

WEIGHT = "linear.weight"
_FOLDER = re.compile(r"(\d{1,3})_Dense")


@dataclass(frozen=True)
class DenseModule:
    """One dense layer: its width, and its matrix, (width, inputs)."""

    width: int
    weight: StoredTensor


def dense_modules(folder: pathlib.Path) -> list[DenseModule]:
    """The dense layers of a model's folder, in order.

    Raises ModelFileError for one with a bias or a function: only a plain matrix commutes with the mean of tokens.
    """
    paths = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and (path / CONFIG).is_file()]
    return [_module(path) for path in sorted(paths, key=lambda path: int(path.name.partition("_")[0]))]


def _module(path: pathlib.Path) -> DenseModule:
    f = Fields(read_json_object(path / CONFIG), str(path / CONFIG))
    function = f.text("activation_function", "Identity")
    if function.rpartition(".")[2] != "Identity":
        raise f.error("activation_function", function, "Identity: dense layers with a function are not supported")
    if f.flag("bias", True):
        raise f.error("bias", True, "false: dense layers with a bias are not supported")
    tensors = read_safetensors(path / SINGLE_FILE)
    if WEIGHT not in tensors:
        raise ModelFileError(f"{path / SINGLE_FILE} has no tensor {WEIGHT!r}")
    return DenseModule(f.integer("out_features", high=MAX_WIDTH), tensors[WEIGHT])
