"""Weights whose rows lie in one stored matrix, head by head, such as gated queries, and adapters of these."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ckdist.models.decoder import weight_shapes
from ckdist.models.families.family import TensorNames
from ckdist.models.moe_weights import is_expert
from ckdist.models.spec import ModelSpec
from ckdist.weights.adapter_file import MAGNITUDE
from ckdist.weights.stored_weights import heads_of


def joined_rows(arrays: Sequence[np.ndarray], heads: int) -> np.ndarray:
    """The rows of a head of all arrays, then those of the next head."""
    by_head = [array.reshape(heads, -1, *array.shape[1:]) for array in arrays]
    return np.concatenate(by_head, axis=1).reshape(-1, *arrays[0].shape[1:])


def joined_adapter(
    names: TensorNames, parameters: Mapping[str, np.ndarray], spec: ModelSpec
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Replaces the matrices of such weights by those of the stored matrix.

    A has the rows of all parts' A. B has zeros at the rows and ranks of other parts.

    Returns:
        The parameters, and by pattern of PEFT the factor of the rank if several parts have matrices.
    """
    parts_of: dict[str, tuple[str, ...]] = {}
    for name in parameters:
        stem = name.partition(".lora_")[0]
        if not is_expert(name):
            parts_of |= {at: parts for at, parts in names.stored([f"{stem}.weight"]).items() if names.has("joined", at)}
    found, ranks, shapes = dict(parameters), dict[str, int](), weight_shapes(spec) if parts_of else {}
    for stored, parts in parts_of.items():
        stem, stems, heads = (
            stored.removesuffix(".weight"),
            [p.removesuffix(".weight") for p in parts],
            heads_of(spec, parts[0]),
        )
        pairs = [[found.pop(f"{one}.lora_{kind}.weight", None) for kind in "AB"] for one in stems]
        low = [a for a, _ in pairs if a is not None]
        values, first = [], 0
        for part, (_, b) in zip(parts, pairs, strict=True):
            values.append(np.zeros((shapes[part][0], sum(map(len, low))), np.float32))
            if b is not None:
                values[-1][:, first : first + b.shape[1]] = b
                first += b.shape[1]
        found[f"{stem}.lora_A.weight"], found[f"{stem}.lora_B.weight"] = np.concatenate(low), joined_rows(values, heads)
        magnitudes = [found.pop(f"{one}{MAGNITUDE}", None) for one in stems]
        if magnitudes[0] is not None:
            found[f"{stem}{MAGNITUDE}"] = joined_rows([m for m in magnitudes if m is not None], heads)
        if len(low) > 1:
            ranks[r".*\." + re.escape(".".join(stem.split(".")[-2:]))] = len(low)
    return found, ranks
