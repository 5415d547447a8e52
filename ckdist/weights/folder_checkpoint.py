"""Opens a folder with config.json and safetensors files as a Checkpoint."""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.models.decoder import EMBEDDING, OUTPUT, SCORE, weight_shapes
from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.registry import family, read_config
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.json_file import quantization_config, read_json_object
from ckdist.weights.safetensors import read_folder
from ckdist.weights.stored_weights import notes_on, required, sources, weights_of
from ckdist.weights.tensor_source import StoredTensor, TensorSource

# Fields of generation_config.json on the first tokens of an encoder-decoder, and on words that it must not generate.
# Newer files have them only there. If both files have one, that file wins, as in transformers. The request sets the
# sampling parameters.
RULES = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids")


def open_folder(path: pathlib.Path) -> Checkpoint:
    """Opens a folder. Raises the errors of `open_checkpoint`."""
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelFileError(f"{path} is not a model: it has no config.json; give a folder with one, or a GGUF file")
    config = with_generation_rules(read_json_object(config_path), path)
    spec, unknown = read_config(config, str(config_path))
    folder = read_folder(path)
    stored, tensors, notes = [], dict(folder.tensors), list(folder.notes)
    if next(path.glob("*_Dense"), None) is not None:
        from ckdist.weights.dense_modules import add_dense_layers

        spec = add_dense_layers(spec, path, tensors, notes)
    quantization = quantization_config(config)
    if quantization or any(name.endswith((".qweight", "weight_scale_2")) for name in tensors):
        from ckdist.weights.published import join_tensors

        stored, tensors = join_tensors(tensors, quantization, str(path))
    stored += tensors.values()
    shapes, names = weight_shapes(spec), family(spec.family).safetensors
    found, unread = sources(spec, names, stored, {OUTPUT: shapes[EMBEDDING], **shapes})
    notes += _naming_notes(names, stored, shapes)
    if spec.tie_embeddings and OUTPUT in found and EMBEDDING not in found:
        found[EMBEDDING] = replace(found[OUTPUT], name=EMBEDDING)
    elif spec.tie_embeddings and OUTPUT in found and not _has_same_bytes(found[OUTPUT], found[EMBEDDING]):
        spec = replace(spec, tie_embeddings=False)
        shapes = weight_shapes(spec)
        notes.append(
            f"config.json ties {OUTPUT} to {EMBEDDING}, and the file has another one, which is used, "
            "as in transformers: set tie_word_embeddings to false"
        )
    tensors = required(spec, shapes, found, str(path), unread)
    predicting = config.get("num_nextn_predict_layers")
    notes += [f"{field} in config.json and is ignored: {spec.family} has no such field" for field in unknown]
    others = [one for one in unread if (one.name, one.shape) != (SCORE, (1, spec.hidden_size))]
    notes += notes_on(spec, others, predicting, str(path))
    return Checkpoint(path, "safetensors", spec, tensors, config, tuple(notes), unread=tuple(unread))


def _naming_notes(
    names: TensorNames, stored: Sequence[StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """A note if tensors are read whose names lack `model.`."""
    stacks = {stack_of(one.name)[0]: one.name for one in stored}
    lacking = [
        stacks[stack] for stack in stacks if weights_of(names, stack, shapes) not in ((), names.weights_of(stack))
    ]
    return [f"names of tensors lack 'model.', as {name!r:.100}: they are read with it" for name in lacking[:1]]


def _has_same_bytes(a: TensorSource, b: TensorSource) -> bool:
    if (a.type, a.shape) != (b.type, b.shape):
        return False
    chunk = 1 << 22
    with open_file(a.file) as file, open_file(b.file) as other:
        file.seek(a.offset)
        other.seek(b.offset)
        return all(
            file.read(n) == other.read(n) for n in (min(chunk, a.nbytes - at) for at in range(0, a.nbytes, chunk))
        )


def with_generation_rules(config: Mapping[str, Any], folder: pathlib.Path) -> Mapping[str, Any]:
    """Adds RULES from the folder's generation_config.json, if it exists, to a config.json.

    Raises ModelFileError if that file is not a JSON object.
    """
    path = folder / "generation_config.json"
    given = read_json_object(path) if path.exists() else {}
    return {**config, **{name: given[name] for name in RULES if given.get(name) is not None}}
