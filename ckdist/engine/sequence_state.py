"""The states of a running sequence: its own, the snapshots that it leaves to others, and that before its drafts."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckdist.program.step_batch import BLOCK_TOKENS, NO_SLOT

if TYPE_CHECKING:
    from ckdist.engine.sequence import Sequence
    from ckdist.engine.state_pool import StatePool

SNAPSHOT_TOKENS = 1024  # within a prompt, a state is saved after each multiple of this
LEAST_TURN_TOKENS = 64  # a shorter first turn gets no snapshot
MOST_ANSWER_BEGIN = 32  # tokens after the last turn of a prompt, as the mark of the assistant, that a template may drop


class StateRow(NamedTuple):
    """The fields of a `struct ckdist_state_slots`."""

    begin: int
    out: int
    save: int
    save_position: int


NO_ROW = StateRow(NO_SLOT, NO_SLOT, NO_SLOT, 0)


class SequenceState:
    """The slots of one running sequence. `release` frees them.

    Args:
        slot: Its own slot.
        begin: Slot that its first chunk begins with. A snapshot has this sequence as a reader. NO_SLOT: it begins with
            its first token.
        reuses: Others may begin with its snapshots.

    Attributes:
        wanted: Number of tokens after which others would begin, so that a snapshot is needed; 0: none.
    """

    def __init__(self, pool: "StatePool", slot: int, begin: int, wanted: int, reuses: bool) -> None:
        self._pool, self._slot, self._begin, self.wanted = pool, slot, begin, wanted
        self._reuses = reuses
        self._snapshot = begin if begin != slot else NO_SLOT  # of the pool, as long as it is read
        self._last_block = -1  # decoding left a snapshot after it, which the next one replaces; -1: none
        self._draft = NO_SLOT  # has the state before the first draft, during a step with drafts

    @classmethod
    def claim(cls, pool: "StatePool", begin: int, known: int, reuses: bool) -> "SequenceState | None":
        """Takes slots for a sequence that begins with the snapshot `begin`. Returns None if too few are available.

        Args:
            known: Tokens of its prefix in known blocks. If the snapshot has fewer, a new one is left there for the next
                sequence with that prefix.
        """
        if begin != NO_SLOT and pool.available == 1 and pool.take(begin):  # the snapshot becomes the state
            return cls(pool, begin, begin, 0, reuses)
        if begin != NO_SLOT:
            pool.hold(begin)
        if not pool.available:
            if begin != NO_SLOT:
                pool.remove_reader(begin)
            return None
        return cls(pool, pool.allocate(), begin, known, reuses)

    def most_tokens(self, sequence: "Sequence", first: int, tokens: int) -> int:
        """Returns the tokens of a chunk of at most `tokens`.

        A chunk leaves one snapshot. So it ends at the wanted one if it would reach the last one of the prompt, too. If
        no block of the prompt is known, one is wanted after its first turn, where other conversations may branch off.
        """
        if first == 0 and self.wanted == 0:
            self.wanted = sequence.first_turn // BLOCK_TOKENS * BLOCK_TOKENS
        last = last_position(sequence.length, sequence.last_turn)
        is_both = self._reuses and first < self.wanted < last <= first + tokens
        return self.wanted - first if is_both else tokens

    def row(self, sequence: "Sequence", first: int, tokens: int) -> StateRow:
        """Returns the slots of a chunk, with a slot for the state that is saved on the way."""
        position = 0
        if self._reuses:
            position = snapshot_position(first, tokens, sequence.length, self.wanted, sequence.last_turn)
        save = self._snapshot_slot(tokens == 1) if position else NO_SLOT
        return StateRow(self._begin, self._slot, save, position if save != NO_SLOT else 0)

    def commit(self) -> None:
        """Marks a chunk as issued. Its full blocks are shared after this."""
        if self._snapshot != NO_SLOT:
            self._pool.remove_reader(self._snapshot)
            self._snapshot = NO_SLOT
        self._begin = self._slot

    def leave(self, sequence: "Sequence", row: StateRow, decoded: bool) -> None:
        """Leaves the snapshot of an issued chunk to other sequences. Call it after sharing the chunk's blocks."""
        if row.save != NO_SLOT:
            self._keep(sequence, row.save_position, row.save, decoded)

    @property
    def can_draft(self) -> bool:
        """True if a slot is left for the state before the first draft."""
        return self._pool.available > 0

    def draft_row(self, first: int) -> StateRow:
        """Returns the slots of a chunk with drafts after position `first`. The state before them is saved."""
        self._draft = self._pool.allocate()
        return StateRow(self._begin, self._slot, self._draft, first + 1)

    def keep_drafts(self, all_right: bool) -> None:
        """Ends a step with drafts. Unless all were right, the next chunk begins with the state before the first."""
        if not all_right:
            self._slot, self._draft = self._draft, self._slot
            self._begin = self._slot
        self._pool.release(self._draft)
        self._draft = NO_SLOT

    def release(self) -> None:
        """Frees all slots. Snapshots stay."""
        if self._snapshot != NO_SLOT:
            self._pool.remove_reader(self._snapshot)
        if self._draft != NO_SLOT:
            self._pool.release(self._draft)
        self._pool.release(self._slot)

    def _snapshot_slot(self, decoded: bool) -> int:
        """Returns a slot for a snapshot, if possible that of the last one that decoding left, or NO_SLOT."""
        slot = NO_SLOT
        if decoded and self._last_block >= 0:
            slot, self._last_block = self._pool.take_after(self._last_block), -1
        return self._pool.allocate() if slot == NO_SLOT and self._pool.available else slot

    def _keep(self, sequence: "Sequence", position: int, slot: int, decoded: bool) -> None:
        *before, block = sequence.block_table[: position // BLOCK_TOKENS].tolist()
        self._last_block = block if self._pool.keep(slot, block, before) and decoded else -1


def snapshot_position(first: int, tokens: int, length: int, wanted: int, last_turn: int = 0) -> int:
    """Number of tokens before the snapshot that a chunk leaves; 0 if it leaves none.

    The first of these that lies in the chunk:

    - `wanted`, where another sequence is known to branch off
    - `last_position`
    - the end of a block that decoding fills, or within a prompt a multiple of SNAPSHOT_TOKENS

    Args:
        length: Tokens of the sequence.
        last_turn: As in `last_position`.
    """
    end = first + tokens
    if first < wanted <= end:
        return wanted
    last = last_position(length, last_turn)
    if first < last <= end:
        return last
    unit = BLOCK_TOKENS if end == length else SNAPSHOT_TOKENS
    position = end // unit * unit
    return position if position > first else 0


def last_position(length: int, last_turn: int) -> int:
    """The last block boundary at which the same prompt could begin again. Its last token is always computed.

    If only the beginning of an answer follows the last turn, it is before that: the next prompt may lack the mark of
    reasoning there.

    Args:
        length: Tokens of the sequence.
        last_turn: Its tokens up to the end of the prompt's last turn.
    """
    end = last_turn if length - last_turn <= MOST_ANSWER_BEGIN else length
    return min(end, length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def turn_ends(prompt: np.ndarray, ends: Collection[int]) -> tuple[int, int]:
    """Tokens of a conversation up to the end of its first turn, and up to the end of its last one.

    The first is 0 if that turn is short, or if only the beginning of an answer follows.

    Args:
        prompt: int32 (tokens,).
        ends: Tokens that end a turn.
    """
    found = np.flatnonzero(np.isin(prompt, list(ends)))
    if not len(found):
        return 0, 0
    first, last = int(found[0]) + 1, int(found[-1]) + 1
    return first if LEAST_TURN_TOKENS <= first <= len(prompt) - BLOCK_TOKENS else 0, last
