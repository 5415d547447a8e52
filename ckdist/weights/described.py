"""A model without weights, for planning: its ModelSpec from a config.json, and a type and shape for each weight.

No tensor is allocated, so a model with a trillion parameters takes no memory.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ckdist.errors import ConfigError
from ckdist.models.decoder import EMBEDDING, OUTPUT, weight_shapes
from ckdist.models.moe_weights import is_expert, is_router
from ckdist.models.registry import spec_from_config
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.json_file import quantization_config, read_json_object
from ckdist.weights.loader import quantized_type
from ckdist.weights.published import check_method
from ckdist.weights.tensor_source import TensorSource

SHAPES = pathlib.Path(__file__).parent / "shapes"  # config.json of published models, by name
STORED = {"float32": dtypes.F32, "float16": dtypes.F16, "bfloat16": dtypes.BF16}


def describe(path: str | os.PathLike[str], kind: str | None = None) -> Checkpoint:
    """The model that the config.json at `path` describes.

    Args:
        path: The config.json.
        kind: Name of the type of its matrices, as Q4_K. None: the type that the file names.

    Raises:
        ModelFileError: It is not such a file.
        ArchitectureError: The family of the model is not known.
        ConfigError: The type is not known.
    """
    config = read_json_object(path)
    return describe_config(config, str(path), kind)


def describe_config(config: Mapping[str, Any], where: str, kind: str | None = None) -> Checkpoint:
    """`describe` for the contents of a config.json. Errors begin with `where`."""
    spec = spec_from_config(config, where)
    if kind is not None and kind.upper() not in dtypes.BY_NAME:
        raise ConfigError(f"--type {kind[:40]} is not known: use one of {', '.join(dtypes.BY_NAME)}")
    stored = _stored_type(config)
    wanted = dtypes.BY_NAME[kind.upper()] if kind else None
    path, tensors = pathlib.Path(where), {}
    for name, shape in weight_shapes(spec).items():
        if wanted is not None and len(shape) > 1:
            number = quantized_type(name, shape[-1], wanted, dtypes.BF16).number
        else:
            number = (_quantized(config, name, where) or stored).number if len(shape) > 1 else dtypes.F32.number
        tensors[name] = TensorSource(name, number, shape, path, 0)
    if spec.tie_embeddings:
        tensors[OUTPUT] = tensors[EMBEDDING]
    return Checkpoint(path, "config", spec, tensors, config)


def shape_path(name: str) -> pathlib.Path | None:
    """The config.json of the bundled shape `name`, or None."""
    return SHAPES / f"{name}.json" if name in shape_names() else None


def near_shape(name: str) -> str | None:
    """The only bundled shape whose name differs by case, owner, a minor version, or the suffix of a tuned model.

    So Llama-3-70B-Instruct is llama-3.1-70b. None if there is no such shape, or more than one.
    """
    plain = lambda text: re.sub(r"(\d)\.\d+(?=-|$)", r"\1", text)
    asked = re.sub(r"-(instruct|chat|it|base)$", "", name.rpartition("/")[2].lower().replace("_", "-"))
    near = [shape for shape in shape_names() if plain(shape) == plain(asked)]
    return near[0] if len(near) == 1 else None


def shape_names() -> list[str]:
    """Names of the bundled shapes."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def _stored_type(config: Mapping[str, Any]) -> dtypes.TensorType:
    """The type of matrices that are not quantised. Defaults to bfloat16."""
    parts = (config, config.get("text_config"))
    names = [part.get(key) for part in parts if isinstance(part, dict) for key in ("torch_dtype", "dtype")]
    return next((STORED[name] for name in names if isinstance(name, str) and name in STORED), dtypes.BF16)


def _quantized(config: Mapping[str, Any], name: str, where: str) -> dtypes.TensorType | None:
    """The type of a matrix in a quantised model; None if this matrix is not quantised."""
    quantization = quantization_config(config)
    if not quantization or name in (EMBEDDING, OUTPUT) or is_router(name):
        return None
    method = check_method(quantization, where)
    if method == "mxfp4":
        return dtypes.MXFP4 if is_expert(name) else None
    if method == "fp8":
        return dtypes.F8_E4M3
    groups = quantization["config_groups"].values()
    if any(group["weights"].get("num_bits") == 8 for group in groups):
        return dtypes.F8_E4M3
    targets = [str(target) for group in groups for target in group.get("targets") or ()]
    ignored = [str(entry) for entry in quantization.get("ignore") or ()]
    only_experts = any("self_attn" in entry for entry in ignored) or any("expert" in target for target in targets)
    return dtypes.INT4_32 if not only_experts or is_expert(name) else None
