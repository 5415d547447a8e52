"""Finds a model's weights in the tensors of its files, whose names and forms differ by family and format."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.models.decoder import EMBEDDING, OUTPUT
from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.spec import LatentAttention, ModelSpec, MoeFfn
from ckdist.weights import dtypes
from ckdist.weights.tensor_source import HeadPart, StoredTensor, TensorSource

INTEGER_WORDS = {"I32": 1, "I64": 2}
KNOWN_TYPES = f"the known ones are {', '.join(dtypes.FLOAT_NUMBERS)}: save it as one of these"


def sources(
    spec: ModelSpec, names: TensorNames, stored: list[StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorSource], list[StoredTensor]]:
    """The source of each weight of `shapes`, and the tensors that hold none of them."""
    found: dict[str, TensorSource] = {}
    stacks: dict[str, dict[int, TensorSource]] = {}
    unread: list[StoredTensor] = []
    for one in stored:
        name, index = stack_of(one.name)
        weights = weights_of(names, name, shapes)
        if not weights:
            unread.append(one)
            continue
        # a vector may be stored as a matrix with one row for each channel
        tensor = replace(one, shape=(math.prod(one.shape),)) if len(shapes[weights[0]]) == 1 else one
        if names.has("padded", weights[0]) and tensor.shape > shapes[weights[0]]:
            tensor = replace(tensor, shape=shapes[weights[0]])
        if names.has("keys_values", tensor.name) or names.has("joined", tensor.name):
            joined = names.has("joined", tensor.name)
            parts = _joined_parts(spec, tensor, weights, shapes) if joined else _head_parts(spec, tensor, weights)
            for part in parts:
                if part.name in found:
                    raise ModelFileError(f"{tensor.file}: {tensor.name!r} and another tensor are both {part.name!r}")
                found[part.name] = part
            continue
        if tensor.dtype in INTEGER_WORDS and weights[0].endswith(".tid2eid"):  # a step reads the bits of the low words
            part = HeadPart(INTEGER_WORDS[tensor.dtype], 0, 1, 1)
            source = TensorSource(weights[0], dtypes.F32.number, tensor.shape, tensor.file, tensor.offset, part=part)
            found[weights[0]] = source
            continue
        if tensor.type < 0:
            raise ModelFileError(f"{tensor.file}: tensor {weights[0]!r} has dtype {tensor.dtype}; {KNOWN_TYPES}")
        known = found if index is None else {w: s[index] for w, s in stacks.items() if index in s}
        transposed = tensor.scales is None and _is_transposed(names, tensor, weights, shapes)
        alternating = names.has("alternating", name)
        if transposed or alternating:
            sources = _interleaved_weights(tensor, weights, shapes, transposed, int(alternating))
        else:
            sources = _weights_in(tensor, weights, shapes)
        for source in sources:
            weight = source.name
            if weight in known or (index is not None and weight in found):
                raise ModelFileError(f"{tensor.file}: {tensor.name!r} and another tensor are both {weight!r}")
            if index is not None:
                stacks.setdefault(weight, {})[index] = source
                continue
            head_rows = head_dim(spec, weight) if names.has("interleaved", weight) else 0
            found[weight] = replace(
                source,
                head_rows=head_rows,
                plus_one=names.has("plus_one", weight),
                exp_sign=names.has("exp", weight) - names.has("minus_exp", weight),
                factor=(spec.hidden_size / source.shape[0]) ** 0.5 if names.has("rank_scaled", weight) else 1.0,
            )
    for weight, matrices in stacks.items():
        found[weight] = _stacked(weight, matrices, shapes[weight])
    return found, unread


def _is_transposed(
    names: TensorNames, tensor: StoredTensor, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """True if the matrices of a tensor have inputs as rows."""
    if not names.has("transposed_or_not", name := stack_of(tensor.name)[0]):
        return names.has("transposed", name)
    return tensor.shape[-2:] != (sum(shapes[weight][-2] for weight in weights), shapes[weights[0]][-1])


def weights_of(names: TensorNames, stored: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The weights in a stored tensor, if all are in `shapes`. Its name may lack `model.`, as AutoModel saves it."""
    for name in (stored, f"model.{stored}"):
        weights = names.weights_of(name)
        if weights and all(weight in shapes for weight in weights):
            return weights
    return ()


def _weights_in(
    tensor: StoredTensor, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorSource]:
    """The sources of weights whose rows follow one another in a tensor, or in each matrix of a stack."""
    if len(weights) > 1 and len(tensor.shape) == len(shapes[weights[0]]) + 1:  # a stack with a matrix of each weight
        tensor = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
    if len(weights) == 1 and shapes[weights[0]] == (1, *tensor.shape):  # a matrix of one row, stored as a vector
        tensor = replace(tensor, shape=(1, *tensor.shape))
    of_rows = max(0, len(tensor.shape) - 2)  # index of the row dimension
    there = tensor.shape[of_rows] if tensor.shape else 0
    rows = [shapes[weight][-2 if len(shapes[weight]) > 1 else 0] for weight in weights] if len(weights) > 1 else [there]
    if there != sum(rows):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}, "
            f"but the model needs {sum(rows)} rows: {', '.join(map(str, rows))} of {', '.join(weights)}"
        )
    columns, scales = math.prod(tensor.shape[of_rows + 1 :]), tensor.scales
    row_bytes = scales.row_step(columns) if scales else dtypes.BY_NUMBER[tensor.type].row_bytes(columns)
    found = []
    for weight, count, begin in zip(weights, rows, itertools.accumulate([0, *rows]), strict=False):
        shape = tensor.shape if len(weights) == 1 else (*tensor.shape[:of_rows], count, *tensor.shape[of_rows + 1 :])
        offsets = [tensor.offset + (matrix * there + begin) * row_bytes for matrix in range(math.prod(shape[:of_rows]))]
        stack = tuple((tensor.file, offset) for offset in offsets) if of_rows else ()
        part = scales and replace(scales, first_row=scales.first_row + begin)
        found.append(TensorSource(weight, tensor.type, shape, tensor.file, offsets[0], matrices=stack, scales=part))
    return found


def _interleaved_weights(
    tensor: StoredTensor, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]], transposed: bool, width: int
) -> list[TensorSource]:
    """The sources of weights whose rows alternate in a tensor, or in each matrix of a stack.

    If `transposed`, the tensor's rows are inputs, and its columns alternate in runs of `width`. 0: as many as a weight
    has rows, so the weights' columns follow one another.
    """
    count, shape = len(weights), shapes[weights[0]]
    *stack, rows, columns = shape if len(shape) > 1 else (*shape, 1)
    needed = (*stack, columns, count * rows) if transposed else (*stack, count * rows, columns)
    if tensor.shape != (needed if len(shape) > 1 else (count * rows,)):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}, but the model needs "
            f"{math.prod(needed)} elements of {', '.join(weights)}: {needed}"
        )
    elements, scales = math.prod(needed[-2:]), tensor.scales
    matrix_bytes = scales.code_bytes(elements) if scales else dtypes.BY_NUMBER[tensor.type].row_bytes(elements)
    offsets = [tensor.offset + matrix * matrix_bytes for matrix in range(math.prod(stack))]
    places = tuple((tensor.file, offset) for offset in offsets) if stack else ()
    parts = (
        HeadPart(columns, 0, columns, count * rows, True, count, lane, width or rows)
        if transposed
        else HeadPart(count, lane, 1, columns)
        for lane in range(count)
    )
    return [
        TensorSource(
            weight, tensor.type, shapes[weight], tensor.file, tensor.offset, matrices=places, part=part, scales=scales
        )
        for weight, part in zip(weights, parts, strict=True)
    ]


def _stacked(weight: str, matrices: Mapping[int, TensorSource], shape: tuple[int, ...]) -> TensorSource:
    """A stack of matrices that are stored one by one.

    Raises ModelFileError if one is missing, if there are too many, or if one differs in type or shape.
    """
    first = matrices[min(matrices)]
    if len(shape) != 3:
        raise ModelFileError(f"{first.file}: {weight!r} is stored as {len(matrices)} matrices, but the model has one")
    missing = [index for index in range(shape[0]) if index not in matrices]
    if missing or len(matrices) > shape[0]:
        what = f"number {missing[0]} is missing" if missing else f"number {max(matrices)} is one too many"
        raise ModelFileError(f"{first.file}: {weight!r} needs {shape[0]} matrices and has {len(matrices)}: {what}")
    for index, one in matrices.items():
        if (one.type, one.shape) != (first.type, first.shape):
            raise ModelFileError(
                f"{one.file}: matrix {index} of {weight!r} is {dtypes.BY_NUMBER[one.type].name} {one.shape}, "
                f"but others are {dtypes.BY_NUMBER[first.type].name} {first.shape}"
            )
    ordered = [matrices[index] for index in range(shape[0])]
    places = tuple((one.file, one.offset) for one in ordered)
    scales = None
    if first.scales is not None:
        from ckdist.weights.scales import stacked_scales

        scales = stacked_scales([one.scales for one in ordered], f"{first.file}: {weight!r}")
    return TensorSource(weight, first.type, (shape[0], *first.shape), *places[0], matrices=places, scales=scales)


def _head_parts(spec: ModelSpec, tensor: StoredTensor, weights: tuple[str, ...]) -> list[TensorSource]:
    """The sources of the matrices that make keys and values from a latent vector. The tensor has both for each head."""
    mixer = spec.layer_of(weights[0]).mixer
    assert isinstance(mixer, LatentAttention)  # only latent attention has these weights
    keys, values, rank, heads = mixer.nope_dim, mixer.v_dim, mixer.kv_lora_rank, mixer.num_heads
    if tensor.shape != (heads * (keys + values), rank):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}, "
            f"but the model needs {(heads * (keys + values), rank)}"
        )
    if tensor.type < 0:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}; {KNOWN_TYPES}")
    k_part = HeadPart(keys + values, 0, keys, rank, transposed=True)
    v_part = HeadPart(keys + values, keys, values, rank)
    stored = {"file": tensor.file, "offset": tensor.offset, "scales": tensor.scales}
    source = lambda name, shape, part: TensorSource(name, tensor.type, shape, part=part, **stored)
    return [source(weights[0], (heads * rank, keys), k_part), source(weights[1], (heads * values, rank), v_part)]


def _joined_parts(
    spec: ModelSpec, tensor: StoredTensor, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorSource]:
    """The sources of weights in a tensor that has, for each head, the rows of one weight, then of the next."""
    heads = heads_of(spec, weights[0])
    rows = [shapes[weight][0] // heads for weight in weights]  # rows per head
    columns = shapes[weights[0]][1]
    if tensor.type < 0 or tensor.shape != (heads * sum(rows), columns):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape} {tensor.dtype}, but the model needs "
            f"{(heads * sum(rows), columns)}: for each of {heads} heads rows of {', '.join(weights)}"
        )
    begins = list(itertools.accumulate([0, *rows]))
    return [
        TensorSource(
            weight, tensor.type, shapes[weight], tensor.file, tensor.offset,
            part=HeadPart(sum(rows), begin, count, columns), scales=tensor.scales,
        )
        for weight, count, begin in zip(weights, rows, begins, strict=False)
    ]  # fmt: skip


def heads_of(spec: ModelSpec, weight: str) -> int:
    """The number of heads in a tensor that groups rows of several weights by head."""
    mixer = spec.layer_of(weight).mixer
    return getattr(mixer, "num_key_heads", 0) or getattr(mixer, "num_heads", 1)


def head_dim(spec: ModelSpec, weight: str) -> int:
    """Rows of one head of a layer's queries and keys."""
    return spec.layer_of(weight).attention.head_dim


def num_heads(spec: ModelSpec, weight: str) -> int:
    """The number of heads of a layer with latent attention."""
    mixer = spec.layer_of(weight).mixer
    assert isinstance(mixer, LatentAttention)  # only latent attention has these weights
    return mixer.num_heads


def num_experts(spec: ModelSpec, weight: str) -> int:
    """The number of experts of a layer with experts."""
    ffn = spec.layer_of(weight).ffn
    assert isinstance(ffn, MoeFfn)  # only a layer with experts has these weights
    return ffn.num_experts


def notes_on(spec: ModelSpec, unread: list[StoredTensor], predicting_layers: Any, where: str) -> tuple[str, ...]:
    """The notes of `notes_on_unread` about a model's files."""
    if not unread:
        return ()
    from ckdist.weights.unread import notes_on_tensors

    return notes_on_tensors(spec, unread, predicting_layers if type(predicting_layers) is int else 0, where)


def required(
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorSource],
    where: str,
    unread: Sequence[StoredTensor],
) -> dict[str, TensorSource]:
    """The sources of all weights that `spec` needs, in the order of `shapes`, its `weight_shapes`.

    Raises ModelFileError if one is missing or has the wrong shape or type.
    """
    tensors = {}
    for name, shape in shapes.items():
        source = found.get(name)
        if source is None:
            there = f"{len(found)} tensors of the model are there"
            if not found and unread:
                there = f"none of the model's tensors are there, but {unread[0].name!r:.100} is one of {len(unread)}"
            raise ModelFileError(f"{where}: tensor {name!r} of shape {shape} is missing; {there}")
        if len(shape) == 2 and len(source.shape) == 3:  # one matrix per head; their rows follow one another
            source = replace(source, shape=(source.shape[0] * source.shape[1], source.shape[2]), matrices=())
        if source.shape != shape:
            raise ModelFileError(
                f"{source.file}: tensor {name!r} has shape {source.shape}, but the model needs {shape}"
            )
        stored = dtypes.BY_NUMBER[source.type]
        if len(shape) == 1 and stored not in dtypes.FLOATS:
            raise ModelFileError(f"{source.file}: vector {name!r} has type {stored.name}; it must be F32, F16 or BF16")
        tensors[name] = source
    if spec.tie_embeddings:
        tensors[OUTPUT] = tensors[EMBEDDING]
    return tensors
