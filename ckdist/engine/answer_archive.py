"""The last answers of each tenant, from which drafts of its later answers are taken."""

from collections import OrderedDict

import numpy as np

from ckdist.engine.ngram_index import NgramIndex

TENANT_TOKENS = 1 << 16  # of one tenant: 256 KiB, and 4 MiB for its index
MAX_TENANTS = 16  # the least recently used one is dropped first


class AnswerArchive:
    """The last answers of each tenant, at most TENANT_TOKENS tokens each. No tenant sees those of another."""

    def __init__(self) -> None:
        self._indices: OrderedDict[bytes, NgramIndex] = OrderedDict()

    def find(self, tenant: bytes | None) -> NgramIndex | None:
        """Returns the tenant's index, or None."""
        index = None if tenant is None else self._indices.get(tenant)
        if index is not None and tenant is not None:
            self._indices.move_to_end(tenant)
        return index

    def add(self, tenant: bytes, answer: np.ndarray) -> None:
        """Adds an answer. If the tenant has no room for it, the older half of its answers is dropped."""
        answer = answer[-TENANT_TOKENS // 2 :]
        index = self._indices.get(tenant)
        if index is None or index.length + len(answer) > len(index.tokens):
            kept = np.empty(0, np.int32) if index is None else index.tokens[: index.length][-TENANT_TOKENS // 2 :]
            index = NgramIndex(np.empty(TENANT_TOKENS, np.int32))  # drafts may still read the old one
            index.tokens[: len(kept)] = kept
            index.extend(len(kept))
            self._indices[tenant] = index
            if len(self._indices) > MAX_TENANTS:
                self._indices.popitem(last=False)
        self._indices.move_to_end(tenant)
        index.tokens[index.length : index.length + len(answer)] = answer
        index.extend(index.length + len(answer))
