"""The slots of sequences' states: which are free, which belong to a running sequence, and which hold a snapshot.

A snapshot is the state behind the last token of a known block, whose prefix can then be gone on from; a state cannot be
cut at any other place. It moves no states; those lie with the executable, under the same slot numbers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ckdist.program.batch import NO_SLOT


@dataclass
class SequenceState:
    """What a running sequence has of the slots."""

    slot: int  # its own
    source: int = NO_SLOT  # the snapshot that its first step begins with
    saving: int = NO_SLOT  # where the step at hand leaves a snapshot,
    position: int = 0  # behind so many tokens
    last_block: int = -1  # behind which decoding left a snapshot, in whose place comes the next one; -1: none
    wanted: int = 0  # behind so many tokens others would begin: a snapshot is to be left there; 0: none

    def row(self, first: int) -> tuple[int, int, int, int]:
        """The fields of a `struct ckdist_state_slots` for a chunk from position `first` on."""
        begin = self.source if self.source != NO_SLOT else self.slot if first else NO_SLOT
        return begin, self.slot, self.saving, self.position


class StatePool:
    """`num_slots` slots. A snapshot that nobody reads gives way when a slot is needed, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.saved = 0  # snapshots, since the start
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # slot -> its block, least recently used first
        self._of_block: dict[int, int] = {}  # block -> the snapshot behind it
        self._readers: dict[int, int] = {}  # slot -> sequences that are about to begin with it

    @property
    def available(self) -> int:
        """Slots that `allocate` can still give."""
        return len(self._free) + len(self._snapshots) - len(self._readers)

    @property
    def snapshots(self) -> int:
        """How many slots hold a snapshot."""
        return len(self._snapshots)

    def latest(self, blocks: Sequence[int]) -> tuple[int, int]:
        """How many of these blocks of a prefix its last snapshot is behind, and that snapshot; 0 and NO_SLOT: none."""
        for count in range(len(blocks), 0, -1):
            slot = self._of_block.get(blocks[count - 1])
            if slot is not None:
                return count, slot
        return 0, NO_SLOT

    def allocate(self) -> int:
        """A slot of the caller's own. Needs `available`."""
        if self._free:
            return self._free.pop()
        slot = next(slot for slot in self._snapshots if slot not in self._readers)
        self._forget(slot)
        return slot

    def release(self, slot: int) -> None:
        """Gives back a slot of the caller's own."""
        self._free.append(slot)

    def hold(self, slot: int) -> None:
        """One more reader of a snapshot, which stays until `let_go`."""
        self._readers[slot] = self._readers.get(slot, 0) + 1

    def let_go(self, slot: int) -> None:
        """One reader less; the snapshot was just used."""
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
        self._snapshots.move_to_end(slot)

    def keep(self, slot: int, block: int) -> bool:
        """Makes a slot of the caller's own the snapshot behind a known block. False, and the slot is given back, where
        that has one.
        """
        known = self._of_block.get(block)
        if known is not None:
            self.release(slot)
            self._snapshots.move_to_end(known)
            return False
        self._snapshots[slot] = block
        self._of_block[block] = slot
        self.saved += 1
        return True

    def take(self, slot: int) -> bool:
        """Makes a snapshot a slot of the caller's own; False where others read it."""
        if slot in self._readers:
            return False
        self._forget(slot)
        return True

    def take_behind(self, block: int) -> int:
        """The same of the snapshot behind a block; NO_SLOT where there is none, or others read it."""
        slot = self._of_block.get(block, NO_SLOT)
        return slot if slot != NO_SLOT and self.take(slot) else NO_SLOT

    def drop(self, block: int) -> None:
        """The block is known no more, nor is the snapshot behind it."""
        slot = self._of_block.get(block)
        if slot is not None:
            self._forget(slot)
            self._free.append(slot)

    def _forget(self, slot: int) -> None:
        del self._of_block[self._snapshots.pop(slot)]
