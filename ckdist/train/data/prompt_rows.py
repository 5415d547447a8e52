"""The prompts of a token cache, for methods that sample the answers. A row is a record's answer with its prompt."""

from dataclasses import dataclass

import numpy as np

from ckdist.errors import ConfigError
from ckdist.train.batch import PackedBatch
from ckdist.train.data.token_cache import TokenCache
from ckdist.train.data.token_rows import Rows


@dataclass(frozen=True, kw_only=True)
class PromptBatch(PackedBatch):
    """Prompts end to end, without targets. `keys` of the sampler are in `seeds`."""

    expected: tuple[np.ndarray, ...]  # tokens of each record's own answer
    seeds: tuple[int, ...]  # of each prompt's samples


class PromptRows(Rows):
    """Some of a cache's documents as prompts.

    Attributes:
        dropped: Documents without a prompt, or whose prompt leaves no room for an answer of one token.
    """

    def __init__(self, cache: TokenCache, documents: np.ndarray, length: int, seed: int) -> None:
        super().__init__(cache, documents, length, seed)
        prompts = [self._prompt(document) for document in documents.tolist()]
        kept = [document for document, size in zip(documents.tolist(), prompts, strict=True) if 0 < size < length]
        self.dropped = len(prompts) - len(kept)
        if not kept:
            raise ConfigError(f"no prompt is left: a record needs a prompt of fewer than max_length ({length}) tokens")
        self.kept = np.array(kept)

    def count(self, epoch: int) -> int:  # noqa: ARG002
        """Number of prompts, the same in every epoch."""
        return len(self.kept)

    def batch(self, epoch: int, indices: range, count: int = 0) -> PromptBatch:  # noqa: ARG002
        """The prompts at the places `indices` of an epoch's order."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.kept))
        prompts, expected, seeds = [np.zeros(0, np.int32)], [], []
        for place in indices:
            document = int(self.kept[order[place]])
            begin, end = int(self.cache.starts[document]), int(self.cache.starts[document + 1])
            size = self._prompt(document)
            tokens = np.asarray(self.cache.tokens[begin:end], np.int32)
            prompts.append(tokens[:size])
            expected.append(tokens[size:])
            seeds.append(int(np.random.default_rng((self.seed, epoch, place, 5)).integers(1 << 62)))
        ids = np.concatenate(prompts)
        starts = np.cumsum([len(prompt) for prompt in prompts]).astype(np.int32)
        targets = np.full(len(ids), -1, np.int32)
        return PromptBatch(ids, targets, starts, expected=tuple(expected), seeds=tuple(seeds))

    def _prompt(self, document: int) -> int:
        """Tokens before the learned ones."""
        begin, end = int(self.cache.starts[document]), int(self.cache.starts[document + 1])
        learned = self.cache.learned
        return 0 if learned is None else int(np.argmax(np.asarray(learned[begin:end]) > 0))
