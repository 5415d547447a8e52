"""Checks the constants of hashes in the files of a model with a table of n-grams."""

from collections.abc import Sequence

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.gated_fields import Ngrams
from ckdist.weights.tensor_source import StoredTensor

FIELDS = {"layer_multipliers": "multipliers", "ngram_heads_vocab_sizes": "sizes", "ngram_heads_offsets": "offsets"}


def check_hashes(n: Ngrams, tensors: Sequence[StoredTensor]) -> None:
    """Raises ModelFileError if a tensor has other numbers than follow from config.json."""
    for tensor in tensors:
        field = FIELDS.get(tensor.name.rpartition(".")[2])
        if field is None:
            continue
        wanted = getattr(n, field)
        if tensor.dtype != "I64" or tensor.shape != (len(wanted),):
            raise ModelFileError(
                f"{tensor.file}: tensor {tensor.name!r} is {tensor.dtype} {tensor.shape}, not I64 ({len(wanted)},)"
            )
        found = tuple(np.fromfile(tensor.file, np.int64, len(wanted), offset=tensor.offset).tolist())
        if found != wanted:
            at = next(i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1])
            raise ModelFileError(
                f"{tensor.file}: tensor {tensor.name!r} has {found[at]} at {at}, but {wanted[at]} follows from "
                "config.json: use the config.json that belongs to these weights"
            )
