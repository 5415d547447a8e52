"""The slots of sequences' states: free, in use by a running sequence, or holding a snapshot.

A snapshot is the state after the last token of a known block, so that a sequence can continue from that prefix. A state
cannot be divided at any other position. The pool moves no states. The executable holds these, under the same slot
numbers.

If a slot is needed, the snapshot with the lowest value is evicted. Value = blocks that a later sequence would have to
compute again / time since the last use (hyperbolic caching, Blankstein et al. 2017). So old snapshots of a long
conversation get sparse, but new turns do not evict its beginning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckdist.program.step_batch import NO_SLOT

NO_BLOCK = -1


@dataclass(slots=True)
class Snapshot:
    """The state after a block.

    Attributes:
        before: Block with the snapshot before it, or NO_BLOCK.
        blocks: Number of blocks since that one, or since the beginning.
        used: Time of its last use, in uses of snapshots.
    """

    block: int
    before: int
    blocks: int
    used: int = 0


class StatePool:
    """Slots for states. A snapshot without readers is evicted if a slot is needed, the least valuable first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.saved = 0  # snapshots, since the start
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: dict[int, Snapshot] = {}  # by slot
        self._uses = 0  # of snapshots, since the start
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
        idle = (slot for slot in self._snapshots if slot not in self._readers)
        slot = min(idle, key=self._value)
        self._forget(slot)
        return slot

    def release(self, slot: int) -> None:
        """Frees a slot that the caller owns."""
        self._free.append(slot)

    def hold(self, slot: int) -> None:
        """Adds a reader to a snapshot, which then stays until `let_go`."""
        self._readers[slot] = self._readers.get(slot, 0) + 1

    def let_go(self, slot: int) -> None:
        """Removes a reader. This is a use."""
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
        self._use(slot)

    def keep(self, slot: int, block: int, blocks_before: Sequence[int] = ()) -> bool:
        """Makes a slot that the caller owns the snapshot after a known block.

        Args:
            blocks_before: The blocks of its prefix.

        Returns:
            False if that block has a snapshot already. The slot is then freed.
        """
        known = self._of_block.get(block)
        if known is not None:
            self.release(slot)
            self._use(known)
            return False
        count, before = self.latest(blocks_before)
        blocks = len(blocks_before) + 1 - count
        self._snapshots[slot] = Snapshot(block, self._snapshots[before].block if count else NO_BLOCK, blocks)
        self._of_block[block] = slot
        self._use(slot)
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

    def _use(self, slot: int) -> None:
        self._uses += 1
        self._snapshots[slot].used = self._uses

    def _value(self, slot: int) -> float:
        snapshot = self._snapshots[slot]
        return snapshot.blocks / (1 + self._uses - snapshot.used)

    def _forget(self, slot: int) -> None:
        gone = self._snapshots.pop(slot)
        del self._of_block[gone.block]
        for snapshot in self._snapshots.values():
            if snapshot.before == gone.block:  # without `gone`, its blocks have to be computed, too
                snapshot.before = gone.before
                snapshot.blocks += gone.blocks
