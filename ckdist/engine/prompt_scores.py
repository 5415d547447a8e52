"""Logits of whole sequences, several in a step, without a scheduler. The composition of steps depends on sizes only."""

from collections import deque
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
    """Yields (documents that end with it, its wanted logits) for each step. Documents are in their order.

    Several steps are in flight if the model has several stages, so that all of them compute.
    """
    waiting = deque[int]()
    try:
        for count, batch in _batches(executable, pieces, documents):
            if len(waiting) == executable.in_flight:
                yield waiting.popleft(), executable.collect().copy()
            executable.publish(batch)
            waiting.append(count)
        while waiting:
            yield waiting.popleft(), executable.collect().copy()
    finally:  # the reader has failed: no step may stay in flight
        while waiting and not executable.failed:
            waiting.popleft()
            executable.collect()


def _batches(
    executable: Executable, pieces: Callable[[int], Sequence[Piece]], documents: range
) -> Iterator[tuple[int, Batch]]:
    """The steps. Each has the number of documents that end with it."""
    room = min(executable.max_outputs, executable.num_blocks * BLOCK_TOKENS)
    most = min(executable.max_sequences, executable.state_slots or executable.max_sequences)
    group: list[Piece] = []
    tokens = 0
    for document in documents:
        own = pieces(document)
        size = -(-len(own[0].ids) // BLOCK_TOKENS) * BLOCK_TOKENS  # in the cache
        is_long = len(own) > 1 or size > room
        if group and (is_long or tokens + size > room or len(group) == most):
            yield len(group), _batch(executable, group)
            group, tokens = [], 0
        if is_long:
            chunks = [chunk for piece in own for chunk in _chunks(executable, piece)]
            yield from ((0, chunk) for chunk in chunks[:-1])
            yield 1, chunks[-1]
        else:
            group.append(own[0])
            tokens += size
    if group:
        yield len(group), _batch(executable, group)


def _batch(executable: Executable, group: Sequence[Piece]) -> Batch:
    """The step of whole sequences."""
    sizes = np.array([len(piece.ids) for piece in group], np.int32)
    blocks = -(-sizes // BLOCK_TOKENS)
    begins = np.cumsum(sizes) - sizes
    wanted = np.concatenate([piece.wanted + begin for piece, begin in zip(group, begins, strict=True)])
    chunks = np.stack([sizes, np.zeros_like(sizes), blocks], 1).astype(np.int32)
    states = own_slots(executable.state_slots, range(len(group)), 0)
    table = np.arange(blocks.sum(), dtype=np.int32)
    ids = np.concatenate([piece.ids for piece in group])
    return Batch(ids, chunks, table, wanted.astype(np.int32), states)


def _chunks(executable: Executable, piece: Piece) -> Iterator[Batch]:
    """The steps of one long sequence, of the most tokens each."""
    for begin in range(0, len(piece.ids), executable.max_outputs):
        ids = piece.ids[begin : begin + executable.max_outputs]
        wanted = piece.wanted[(piece.wanted >= begin) & (piece.wanted < begin + len(ids))] - begin
        blocks = -(-(begin + len(ids)) // BLOCK_TOKENS)
        chunks = np.array([[len(ids), begin, blocks]], np.int32)
        states = own_slots(executable.state_slots, range(1), begin)
        yield Batch(ids, chunks, np.arange(blocks, dtype=np.int32), wanted, states)
