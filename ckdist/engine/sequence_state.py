"""The states of a running sequence: its own, the snapshots that it leaves to others, and those that it can return to.

A sequence that may be rolled back saves its state on its way, in slots of its own. One of these states is always at or
before the first position that a rollback can reach. After a rollback the next chunk begins with the last saved state
that is still right, and computes the tokens since then again. The bits do not depend on the chunks.
"""

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
        spare: Slots for saved states.

    Attributes:
        wanted: Number of tokens after which others would begin, so that a snapshot is needed; 0: none.
    """

    def __init__(self, pool: "StatePool", slot: int, begin: int, wanted: int, reuses: bool, spare: list[int]) -> None:
        self._pool, self._slot, self._begin, self.wanted = pool, slot, begin, wanted
        self._reuses, self._spare = reuses, spare
        self._snapshot = begin if begin != slot else NO_SLOT  # of the pool, as long as it is read
        self._last_block = -1  # decoding left a snapshot after it, which the next one replaces; -1: none
        self._saved = [(0, NO_SLOT)]  # (position, slot), ascending; the state before the first token needs no slot
        self._is_offered = False  # the first of these is a snapshot of the pool, which it holds as a reader

    @classmethod
    def claim(cls, pool: "StatePool", begin: int, known: int, reuses: bool, spare: int) -> "SequenceState | None":
        """Takes slots for a sequence that begins with the snapshot `begin`. Returns None if too few are available.

        Args:
            known: Tokens of its prefix in known blocks. If the snapshot has fewer, a new one is left there for the next
                sequence with that prefix.
            spare: Slots for saved states.
        """
        if begin != NO_SLOT and pool.available == 1 + spare and pool.take(begin):  # the snapshot becomes the state
            return cls(pool, begin, begin, 0, reuses, [pool.allocate() for _ in range(spare)])
        if begin != NO_SLOT:
            pool.hold(begin)
        if pool.available <= spare:
            if begin != NO_SLOT:
                pool.let_go(begin)
            return None
        slot, *others = [pool.allocate() for _ in range(1 + spare)]
        return cls(pool, slot, begin, known, reuses, others)

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
        end, save = first + tokens, NO_SLOT
        if _crosses(sequence, end):
            self._settle(sequence)
            position = saved_position(first, end, sequence.settled)
            save = self._spare.pop() if position else NO_SLOT
        else:
            position = (
                snapshot_position(first, tokens, sequence.length, self.wanted, sequence.last_turn)
                if self._reuses
                else 0
            )
            save = self._snapshot_slot(tokens == 1) if position else NO_SLOT
        return StateRow(self._begin, self._slot, save, position if save != NO_SLOT else 0)

    def commit(self, sequence: "Sequence", row: StateRow) -> None:
        """Marks a chunk with this row as issued. Its full blocks are shared after this."""
        if self._snapshot != NO_SLOT:
            self._pool.let_go(self._snapshot)
            self._snapshot = NO_SLOT
        self._begin = self._slot
        if row.save != NO_SLOT and _crosses(sequence, sequence.computed):
            self._saved.append((row.save_position, row.save))

    def leave(self, sequence: "Sequence", row: StateRow, decoded: bool) -> None:
        """Leaves the snapshot of an issued chunk to other sequences. Call it after sharing the chunk's blocks."""
        if _crosses(sequence, sequence.computed):
            self._settle(sequence)
            self._offer(sequence)
        elif row.save != NO_SLOT:
            self._keep(sequence, row.save_position, row.save, decoded)

    def base(self, settled: int) -> int:
        """Position of the last saved state at or before `settled`. No rollback computes tokens before it again."""
        return max(position for position, _ in self._saved if position <= settled)

    def rollback(self, position: int) -> int:
        """Lets the next chunk begin with the last state saved at or before `position`. Returns its position."""
        while self._saved[-1][0] > position:
            self._spare.append(self._saved.pop()[1])
        first, self._begin = self._saved[-1]
        return first

    def release(self, sequence: "Sequence") -> None:
        """Frees all slots. Snapshots stay, and the last settled state becomes one."""
        if self._snapshot != NO_SLOT:
            self._pool.let_go(self._snapshot)
        self._settle(sequence)
        self._offer(sequence)
        while self._saved:
            self._drop_first()
        for slot in (self._slot, *self._spare):
            self._pool.release(slot)

    def _settle(self, sequence: "Sequence") -> None:
        """Drops the saved states that no rollback needs any more."""
        while len(self._saved) > 1 and self._saved[1][0] <= sequence.settled:
            self._drop_first()

    def _offer(self, sequence: "Sequence") -> None:
        """Makes the first saved state a snapshot if it follows a shared block and there is a slot in exchange."""
        position, slot = self._saved[0]
        blocks, rest = divmod(position, BLOCK_TOKENS)
        if self._is_offered or not self._reuses or slot == NO_SLOT or rest or blocks > sequence.shared_blocks:
            return
        _, known = self._pool.latest([int(sequence.block_table[blocks - 1])])
        decoded = position > len(sequence.prompt)
        exchange = slot if known != NO_SLOT else self._snapshot_slot(decoded)
        if exchange == NO_SLOT:
            return
        self._spare.append(exchange)
        if known == NO_SLOT:
            self._keep(sequence, position, slot, decoded)
            known = slot
        self._pool.hold(known)
        self._saved[0], self._is_offered = (position, known), True

    def _drop_first(self) -> None:
        _, slot = self._saved.pop(0)
        if self._is_offered:
            self._pool.let_go(slot)
        elif slot != NO_SLOT:
            self._spare.append(slot)
        self._is_offered = False

    def _snapshot_slot(self, decoded: bool) -> int:
        """Returns a slot for a snapshot, if possible that of the last one that decoding left, or NO_SLOT."""
        slot = NO_SLOT
        if decoded and self._last_block >= 0:
            slot, self._last_block = self._pool.take_behind(self._last_block), -1
        return self._pool.allocate() if slot == NO_SLOT and self._pool.available else slot

    def _keep(self, sequence: "Sequence", position: int, slot: int, decoded: bool) -> None:
        *before, block = sequence.block_table[: position // BLOCK_TOKENS].tolist()
        self._last_block = block if self._pool.keep(slot, block, before) and decoded else -1


def _crosses(sequence: "Sequence", end: int) -> bool:
    """Whether a chunk that ends there has tokens that may be rolled back."""
    return sequence.max_rollback > 0 and end >= sequence.settled


def saved_position(first: int, end: int, settled: int) -> int:
    """Number of tokens before the state that a chunk of [first, end) saves for a rollback; 0 if it saves none.

    The last block boundary, else the end of the settled tokens. Only settled tokens are saved if the chunk has any.
    """
    limit = settled if first < settled else end
    boundary = limit // BLOCK_TOKENS * BLOCK_TOKENS
    if boundary > first:
        return boundary
    return settled if first < settled else 0


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
