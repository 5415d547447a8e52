"""Logits of whole sequences, several in a step, without a scheduler. The composition of steps depends on sizes only."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ckdist.program.executable import Executable
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots


class Piece(NamedTuple):
    """Tokens that are computed together, and the places of those whose logits are wanted, ascending."""

    ids: np.ndarray  # int32 (tokens,)
    wanted: np.ndarray  # int32


def windows(ids: np.ndarray, learned: np.ndarray, context: int) -> list[Piece]:
    """A sequence in windows of the context, at least 2; the first half of every later one is context only.

    The wanted places are those before a learned token. Each is in one window.
    """
    found, begin, half = [], 0, min(context // 2, context - 2)
    before = np.append(learned[1:], False)
    while True:
        end = min(begin + context, len(ids))
        wanted = before[begin:end].copy()
        wanted[: half if begin else 0] = False
        if end < len(ids):
            wanted[-1] = False  # the next window has it
        found.append(Piece(ids[begin:end], np.flatnonzero(wanted).astype(np.int32)))
        if end == len(ids):
            return found
        begin = end - half - 1


def steps_of(
    executable: Executable, pieces: Callable[[int], Sequence[Piece]], documents: range
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (documents, wanted logits) for groups of documents in their order."""
    room = min(executable.max_tokens, executable.num_blocks * BLOCK_TOKENS)
    most = min(executable.max_sequences, executable.state_slots or executable.max_sequences)
    group: list[Piece] = []
    tokens = 0

    def run() -> Iterator[tuple[int, np.ndarray]]:
        if group:
            yield len(group), _step(executable, group)

    for document in documents:
        own = pieces(document)
        size = -(-len(own[0].ids) // BLOCK_TOKENS) * BLOCK_TOKENS  # in the cache
        if len(own) > 1 or size > room:
            yield from run()
            group, tokens = [], 0
            yield 1, np.concatenate([_chunked(executable, piece) for piece in own])
            continue
        if tokens + size > room or len(group) == most:
            yield from run()
            group, tokens = [], 0
        group.append(own[0])
        tokens += size
    yield from run()


def _step(executable: Executable, group: Sequence[Piece]) -> np.ndarray:
    """The wanted logits of sequences in one step."""
    sizes = np.array([len(piece.ids) for piece in group], np.int32)
    blocks = -(-sizes // BLOCK_TOKENS)
    begins = np.cumsum(sizes) - sizes
    wanted = np.concatenate([piece.wanted + begin for piece, begin in zip(group, begins, strict=True)])
    chunks = np.stack([sizes, np.zeros_like(sizes), blocks], 1).astype(np.int32)
    states = own_slots(executable.state_slots, range(len(group)), 0)
    table = np.arange(blocks.sum(), dtype=np.int32)
    ids = np.concatenate([piece.ids for piece in group])
    return executable.run(Batch(ids, chunks, table, wanted.astype(np.int32), states)).copy()


def _chunked(executable: Executable, piece: Piece) -> np.ndarray:
    """The wanted logits of one long sequence, in steps of the most tokens."""
    kept = []
    for begin in range(0, len(piece.ids), executable.max_tokens):
        ids = piece.ids[begin : begin + executable.max_tokens]
        wanted = piece.wanted[(piece.wanted >= begin) & (piece.wanted < begin + len(ids))] - begin
        blocks = -(-(begin + len(ids)) // BLOCK_TOKENS)
        chunks = np.array([[len(ids), begin, blocks]], np.int32)
        states = own_slots(executable.state_slots, range(1), begin)
        kept.append(executable.run(Batch(ids, chunks, np.arange(blocks, dtype=np.int32), wanted, states)).copy())
    return np.concatenate(kept)
