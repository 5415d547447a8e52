"""The slots of sequences' states: free, in use by a running sequence, or holding a snapshot.

A snapshot is the state after the last token of a known block, so that a sequence can continue from that prefix. A state
cannot be divided at any other position. The pool moves no states. The executable holds these, under the same slot
numbers.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ckdist.program.step_batch import NO_SLOT


class StatePool:
    """Slots for states. A snapshot without readers is evicted if a slot is needed, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.saved = 0  # snapshots, since the start
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # slot -> its block, least recently used first
        self._of_block: dict[int, int] = {}  # block -> the snapshot after it
        self._readers: dict[int, int] = {}  # slot -> sequences that are about to begin with it
        self.on_keep: Callable[[int, int], None] | None = None  # called with slot and block of a new snapshot

    @property
    def available(self) -> int:
        """Slots that `allocate` can still return."""
        return len(self._free) + len(self._snapshots) - len(self._readers)

    @property
    def snapshots(self) -> int:
        """Number of slots that hold a snapshot."""
        return len(self._snapshots)

    def latest(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Finds the last snapshot in a prefix. Returns the number of blocks before it and its slot, or (0, NO_SLOT)."""
        for count in range(len(blocks), 0, -1):
            slot = self._of_block.get(blocks[count - 1])
            if slot is not None:
                return count, slot
        return 0, NO_SLOT

    def allocate(self) -> int:
        """Returns a slot for the caller's own use. Needs one `available`."""
        if self._free:
            return self._free.pop()
        slot = next(slot for slot in self._snapshots if slot not in self._readers)
        self._forget(slot)
        return slot

    def release(self, slot: int) -> None:
        """Frees a slot that the caller owns."""
        self._free.append(slot)

    def hold(self, slot: int) -> None:
        """Adds a reader to a snapshot, which then stays until `let_go`."""
        self._readers[slot] = self._readers.get(slot, 0) + 1

    def let_go(self, slot: int) -> None:
        """Removes a reader. The snapshot is now the most recently used."""
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
        self._snapshots.move_to_end(slot)

    def keep(self, slot: int, block: int) -> bool:
        """Makes a slot that the caller owns the snapshot after a known block.

        Returns:
            False if that block has a snapshot already. The slot is then freed.
        """
        known = self._of_block.get(block)
        if known is not None:
            self.release(slot)
            self._snapshots.move_to_end(known)
            return False
        self._snapshots[slot] = block
        self._of_block[block] = slot
        self.saved += 1
        if self.on_keep is not None:
            self.on_keep(slot, block)
        return True

    def slot_after(self, block: int) -> int:
        """The snapshot after a known block, or NO_SLOT."""
        return self._of_block.get(block, NO_SLOT)

    def take(self, slot: int) -> bool:
        """Makes the caller the owner of a snapshot's slot. Returns False if others read it."""
        if slot in self._readers:
            return False
        self._forget(slot)
        return True

    def take_behind(self, block: int) -> int:
        """Takes the snapshot after a block. Returns NO_SLOT if there is none, or if others read it."""
        slot = self.slot_after(block)
        return slot if slot != NO_SLOT and self.take(slot) else NO_SLOT

    def drop(self, block: int) -> None:
        """Drops the snapshot after a block that is no longer known."""
        slot = self._of_block.get(block)
        if slot is not None:
            self._forget(slot)
            self._free.append(slot)

    def _forget(self, slot: int) -> None:
        del self._of_block[self._snapshots.pop(slot)]
