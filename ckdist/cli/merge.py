"""`ckdist merge -m MODEL --lora DIR OUT`: writes a model with an adapter added to its weights."""

import logging
import pathlib

import numpy as np

from ckdist.config.tuning_commands import MergeCommand
from ckdist.errors import CapacityError, ConfigError
from ckdist.hub.resolve import resolve
from ckdist.layouts.memory_sizes import free_memory, gigabytes, room
from ckdist.tokens.tried import load_tried
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.gguf_export import write_model
from ckdist.weights.merged_weights import MergedWeights
from ckdist.weights.tensor_source import TensorSource

log = logging.getLogger(__name__)
FOLDER_TYPES = {"": "bfloat16", "bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def run(command: MergeCommand) -> int:
    """Writes the file or the folder. Returns 0."""
    checkpoint = open_checkpoint(resolve(command.model) or "")
    target = str(command.target)
    is_file = target.endswith(".gguf")
    if not is_file and (checkpoint.format == "gguf" or command.type not in FOLDER_TYPES):
        reason = f"{command.model} is a GGUF" if checkpoint.format == "gguf" else f"{command.type} is a type of GGUF"
        raise ConfigError(f"{reason}: name a file to write, as {target.rstrip('/')}.gguf")
    merged = MergedWeights(checkpoint, pathlib.Path(command.lora))
    for note in merged.notes:
        log.warning("%s: %s", command.lora, note)
    if is_file:
        size = write_model(checkpoint, target, command.type or "f16", progress=True, read=merged.rows)
        print(f"{target}: {command.type or 'f16'}, {size / 1e6:.1f} MB")
        return 0
    _write_folder(checkpoint, merged, pathlib.Path(target), FOLDER_TYPES[command.type])
    print(f"{target}: {FOLDER_TYPES[command.type]}")
    return 0


def _write_folder(checkpoint: Checkpoint, merged: MergedWeights, target: pathlib.Path, dtype: str) -> None:
    """Writes a Hugging Face folder. Raises CapacityError if the weights do not fit into memory in float32."""
    from ckdist.train.model_folder import write_folder

    if target.resolve() == checkpoint.path.resolve():
        raise ConfigError(f"{target} is the model itself: name another folder")
    needed = sum(4 * int(np.prod(source.shape, dtype=np.int64)) for source in checkpoint.tensors.values())
    if needed > free_memory(1):
        raise CapacityError(
            f"a merged folder needs {gigabytes(needed)}, and {room(free_memory(1))}: write a file, as {target}.gguf"
        )
    weights = {name: _whole(name, source, merged) for name, source in checkpoint.tensors.items()}
    if checkpoint.spec.tie_embeddings:
        weights.pop("lm_head.weight", None)
    tokenizer = load_tried(checkpoint.path)
    write_folder(target, checkpoint.spec, checkpoint.metadata, weights, tokenizer, checkpoint.path, dtype)


def _whole(name: str, source: TensorSource, merged: MergedWeights) -> np.ndarray:
    if not source.matrices:
        return merged.rows(name, source, 0, source.shape[0])
    return np.stack([merged.rows(name, source, 0, source.shape[1], matrix) for matrix in range(source.shape[0])])
