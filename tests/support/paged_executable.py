"""An executable without a model: a paged cache of token ids, and logits that hash the whole prefix found through the
block table.

Any mistake in a block table, a position, a reused prefix, a chunk or a preemption changes the text.
"""

import functools
import zlib
from collections import deque
from types import SimpleNamespace

import numpy as np

from ckdist.program.stage_costs import StageCosts
from ckdist.program.step_batch import BLOCK_TOKENS, Batch


class PagedExecutable:
    """Its hidden states are its logits.

    `state_slots`: layers keep states, which are the tokens that they have seen; logits are then of these.
    """

    def __init__(
        self,
        num_blocks=64,
        max_tokens=32,
        max_sequences=8,
        vocab_size=50,
        context_length=512,
        state_slots=0,
        in_flight=1,
    ):
        self.state_slots, self.in_flight, self.costs = state_slots, in_flight, StageCosts(in_flight, 30.0)
        self.published: deque[np.ndarray] = deque()
        self.most_under_way = 0
        self.states: list[list[int]] = [[] for _ in range(state_slots)]
        self.num_blocks, self.max_tokens, self.max_sequences = num_blocks, max_tokens, max_sequences
        self.max_outputs = max_tokens
        self.vocab_size, self.context_length = vocab_size, context_length
        self.has_logits = self.has_hidden = True
        self.has_axes = False
        self.splits_roles = False
        self.cache = np.full((num_blocks, BLOCK_TOKENS), -1, np.int32)
        self.batches: list[list[tuple[int, int]]] = []  # of each step: tokens and first position of its runs
        self.outputs: list[int] = []
        self.failure: Exception | None = None

    def publish(self, batch: Batch) -> None:
        """Ranks run steps in the order in which they were issued, so this is what a step finds and leaves."""
        assert len(self.published) < self.in_flight
        self.published.append(self.run(batch))
        self.most_under_way = max(self.most_under_way, len(self.published))

    def collect(self) -> np.ndarray:
        return self.published.popleft()

    def run(self, batch: Batch) -> np.ndarray:
        if self.failure is not None:
            raise self.failure
        for array in (batch.token_ids, batch.chunks, batch.block_tables, batch.logits_indices):
            assert array.dtype == np.int32
        assert 0 < len(batch.token_ids) <= self.max_tokens and 0 < len(batch.chunks) <= self.max_sequences
        assert batch.chunks[:, 0].sum() == len(batch.token_ids) and batch.chunks[:, 2].sum() == len(batch.block_tables)
        assert (np.diff(batch.logits_indices) > 0).all()
        begin = block = 0
        rows = []
        for tokens, first, blocks in batch.chunks.tolist():
            table = batch.block_tables[block : block + blocks]
            assert len(set(table.tolist())) == blocks and table.min() >= 0 and table.max() < self.num_blocks
            assert first + tokens <= min(blocks * BLOCK_TOKENS, self.context_length)
            positions = np.arange(first, first + tokens)
            self.cache[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = batch.token_ids[
                begin : begin + tokens
            ]
            begin, block = begin + tokens, block + blocks
        self.update_states(batch)
        begin = block = 0
        for tokens, first, blocks in batch.chunks.tolist():  # all keys are written before any is read, as layers do
            prefix = self.cache[batch.block_tables[block : block + blocks]].reshape(-1)
            for output in batch.logits_indices[
                (batch.logits_indices >= begin) & (batch.logits_indices < begin + tokens)
            ]:
                rows.append(prefix_logits(prefix[: first + int(output) - begin + 1], self.vocab_size))  # noqa: PERF401
            begin, block = begin + tokens, block + blocks
        self.batches.append(batch.chunks[:, :2].tolist())
        self.outputs.append(len(rows))
        return np.array(rows, np.float32).reshape(-1, self.vocab_size)

    def update_states(self, batch: Batch) -> None:
        assert (batch.states is not None) == (self.state_slots > 0)
        if batch.states is None:
            return
        written = [slot for _, out, save, _ in batch.states.tolist() for slot in (out, save) if slot >= 0]
        assert len(set(written)) == len(written) and max(written) < self.state_slots
        begin = block = 0
        for (source, out, save, position), (tokens, first, blocks) in zip(
            batch.states.tolist(), batch.chunks.tolist(), strict=True
        ):
            assert source == out or source not in written
            before = self.states[source] if source >= 0 else []
            assert len(before) == first, "a state goes on behind other tokens than its own"
            cached = self.cache[batch.block_tables[block : block + blocks]].reshape(-1)
            assert before == cached[:first].tolist(), "a state has seen other tokens than the cache has"
            seen = before + batch.token_ids[begin : begin + tokens].tolist()
            if save >= 0:
                assert first < position <= first + tokens
                self.states[save] = seen[:position]
            self.states[out] = seen
            begin, block = begin + tokens, block + blocks


def prefix_logits(prefix, vocab_size: int) -> np.ndarray:
    """float32 (vocab,): what stands for a model's forward over `prefix`."""
    prefix = np.asarray(prefix, np.int32)
    assert (prefix >= 0).all(), "a position was read that nothing was written to"
    return _normal(zlib.crc32(prefix.tobytes()), vocab_size)


@functools.lru_cache(1 << 14)  # a sequence is computed alone, too
def _normal(key: int, size: int) -> np.ndarray:
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(size, np.float32)
    values.flags.writeable = False
    return values


@functools.lru_cache(1 << 14)
def _gumbel(key: tuple[int, int], size: int) -> np.ndarray:
    return np.random.default_rng(key).gumbel(size=size)


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


class PlainSampler:
    """The sampler's interface, plainly: the draw depends on (seed, position) alone, logprobs are of the unchanged
    logits.
    """

    def sample(self, logits, rows):
        assert len(logits) == len(rows)
        samples = []
        for values, row in zip(logits, rows, strict=True):
            assert row.length == len(row.prompt) + len(row.output)
            heat = row.params.temperature
            noise = _gumbel((row.seed, row.length), len(values)) * heat if heat else 0
            token = int(np.argmax(values + noise))
            if row.params.logprobs is None:
                samples.append(SimpleNamespace(token=token, logprob=None, top=[]))
            else:
                samples += self.logprobs(values[None], np.array([token]), row.params.logprobs)
        return samples

    def logprobs(self, logits, targets, top):
        result = []
        for row, target in zip(logits, targets, strict=True):
            values = log_softmax(row)
            best = np.argsort(-values, kind="stable")[:top]
            top_pairs = tuple((int(token), float(values[token])) for token in best)
            result.append(SimpleNamespace(token=int(target), logprob=float(values[target]), top=top_pairs))
        return result


def alone(prompt, params, seed=0, vocab_size=50, limit=512) -> list[int]:
    """The tokens that a sequence gets with the whole machine to itself; no EOS, no stop tokens."""
    sampler, output = PlainSampler(), []
    while len(output) < params.max_tokens and len(prompt) + len(output) < limit:
        row = SimpleNamespace(params=params, seed=seed, length=len(prompt) + len(output), prompt=prompt, output=output)
        (sample,) = sampler.sample(prefix_logits([*prompt, *output], vocab_size)[None], [row])
        output.append(sample.token)
    return output
