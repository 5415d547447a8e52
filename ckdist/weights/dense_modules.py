"""Dense layers after the pooling of embeddings, as sentence-transformers stores them: folders 2_Dense, 3_Dense."""

import pathlib
import re
from dataclasses import replace

from ckdist.errors import ModelFileError
from ckdist.hub.folder_files import CONFIG, SINGLE_FILE
from ckdist.models.decoder import projection
from ckdist.models.fields import Fields
from ckdist.models.limits import MAX_WIDTH
from ckdist.models.spec import ModelSpec
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import read_safetensors
from ckdist.weights.tensor_source import StoredTensor

WEIGHT = "linear.weight"
_FOLDER = re.compile(r"(\d{1,3})_Dense")


def add_dense_layers(
    spec: ModelSpec, folder: pathlib.Path, tensors: dict[str, StoredTensor], notes: list[str]
) -> ModelSpec:
    """Returns `spec` with the dense layers of a model's folder, and adds their matrices to `tensors`.

    A decoder's are not read, which a note says. Raises ModelFileError for one with a bias or a function: only a plain
    matrix commutes with the mean of tokens.
    """
    paths = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and (path / CONFIG).is_file()]
    if spec.generates or spec.encoder is not None:
        notes += [f"embeddings are those before the dense layer {path.name}, which is not read" for path in paths]
        return spec
    widths = []
    for i, path in enumerate(sorted(paths, key=lambda path: int(path.name.partition("_")[0]))):
        width, matrix = _module(path)
        widths.append(width)
        tensors[projection(i)] = replace(matrix, name=projection(i))
    return replace(spec, projections=tuple(widths))


def _module(path: pathlib.Path) -> tuple[int, StoredTensor]:
    """The width of a dense layer, and its matrix, (width, inputs)."""
    f = Fields(read_json_object(path / CONFIG), str(path / CONFIG))
    function = f.text("activation_function", "Identity")
    if function.rpartition(".")[2] != "Identity":
        raise f.error("activation_function", function, "Identity: dense layers with a function are not supported")
    if f.flag("bias", True):
        raise f.error("bias", True, "false: dense layers with a bias are not supported")
    tensors = read_safetensors(path / SINGLE_FILE)
    if WEIGHT not in tensors:
        raise ModelFileError(f"{path / SINGLE_FILE} has no tensor {WEIGHT!r}")
    return f.integer("out_features", high=MAX_WIDTH), tensors[WEIGHT]
