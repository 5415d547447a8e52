"""The entries of a cache on disk by name, on rank 0 alone: a tree of prefixes in slots, with a bound.

An entry without children is evicted first that was not used for the longest time. An entry that was used again counts
as if it had been used one whole filling of the cache later. So it outlives those that were used once, but not forever.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class DiskEntry:
    """One stored block or state."""

    slot: int
    parent: bytes
    used: int  # number of the last use, in the order of all uses
    uses: int = 1
    children: int = 0
    is_stored: bool = False  # every rank has confirmed it


class DiskIndex:
    """Slots from 0 to `capacity` - 1 and the entries in them.

    Attributes:
        on_remove: Called with the name of an entry that is gone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted = 0  # entries, since the start
        self.on_remove: Callable[[bytes], None] | None = None
        self._entries: dict[bytes, DiskEntry] = {}
        self._free: list[int] = []
        self._unused = 0  # the slots from here on were never used
        self._clock = 0
        self._leaves: list[tuple[int, bytes]] = []  # a heap of (age, name); obsolete ones are skipped

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    def stored(self, name: bytes) -> DiskEntry | None:
        """The entry if it can be loaded, else None."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.is_stored else None

    def touch(self, names: Iterable[bytes]) -> None:
        """Counts a use of each of these entries that exists."""
        self._clock += 1
        for name in names:
            entry = self._entries.get(name)
            if entry is not None:
                entry.used, entry.uses = self._clock, entry.uses + 1
                self._offer(name, entry)

    def reserve(self, name: bytes, parent: bytes) -> int | None:
        """Makes an entry that is not stored yet. Evicts one if the cache is full.

        Returns:
            Its slot. None if all entries have children or are being stored.
        """
        above = self._entries.get(parent)
        if above is not None:
            above.children += 1  # first, so that it is not evicted
        slot = self._free.pop() if self._free else self._unused
        if slot == self._unused:
            if slot < self.capacity:
                self._unused += 1
            elif self.evict() is None:
                self._leave(parent)
                return None
            else:
                slot = self._free.pop()
        self._clock += 1
        self._entries[name] = DiskEntry(slot, parent, self._clock)
        return slot

    def confirm(self, name: bytes, slot: int) -> None:
        """The entry in this slot is stored on every rank."""
        entry = self._entries.get(name)
        if entry is not None and entry.slot == slot:
            entry.is_stored = True
            self._offer(name, entry)

    def drop(self, name: bytes) -> None:
        """Removes an entry and all its descendants."""
        entry = self._entries.get(name)
        if entry is None:
            return
        if not entry.children:
            self._remove(name)
            return
        below: dict[bytes, list[bytes]] = {}
        for child, known in self._entries.items():
            below.setdefault(known.parent, []).append(child)
        dropped = [name]
        for above in dropped:  # it grows in the loop
            dropped += below.get(above, [])
        for below_name in reversed(dropped):
            self._remove(below_name)

    def restore(self, found: Sequence[tuple[int, int, int, bytes, bytes]]) -> None:
        """Fills an empty index. An entry whose parent is missing is left out.

        Args:
            found: (depth, generation, slot, name, parent) of each entry. A name that occurs twice keeps the newer slot.
        """
        latest: dict[bytes, tuple[int, int, int, bytes, bytes]] = {}
        for item in sorted(found, key=lambda item: item[1]):
            latest[item[3]] = item
        for depth, generation, slot, name, parent in sorted(latest.values()):
            above = self._entries.get(parent)
            if depth and above is None:
                continue
            if above is not None:
                above.children += 1
            self._entries[name] = DiskEntry(slot, parent, generation, is_stored=True)
        for name, entry in self._entries.items():
            self._clock = max(self._clock, entry.used)
            self._offer(name, entry)
        used = self.slots
        self._unused = max(used, default=-1) + 1
        self._free = [slot for slot in range(self._unused - 1, -1, -1) if slot not in used]

    @property
    def slots(self) -> set[int]:
        """The slots of all entries."""
        return {entry.slot for entry in self._entries.values()}

    def generation(self, name: bytes) -> int:
        """Number of the entry's last use, which orders entries after a restart."""
        return self._entries[name].used

    def _age(self, entry: DiskEntry) -> int:
        return entry.used + (self.capacity if entry.uses > 1 else 0)

    def _offer(self, name: bytes, entry: DiskEntry) -> None:
        if entry.is_stored and not entry.children:
            heapq.heappush(self._leaves, (self._age(entry), name))
            if len(self._leaves) > 4 * len(self._entries) + 64:  # mostly obsolete
                self._leaves = [
                    (self._age(known), known_name)
                    for known_name, known in self._entries.items()
                    if known.is_stored and not known.children
                ]
                heapq.heapify(self._leaves)

    def evict(self) -> int | None:
        """Removes the entry that has the least claim to stay. Returns its slot, or None if there is none."""
        while self._leaves:
            age, name = heapq.heappop(self._leaves)
            entry = self._entries.get(name)
            if entry is not None and entry.is_stored and not entry.children and self._age(entry) == age:
                self._remove(name)
                self.evicted += 1
                return entry.slot
        return None

    def _remove(self, name: bytes) -> None:
        entry = self._entries.pop(name)
        self._free.append(entry.slot)
        self._leave(entry.parent)
        if self.on_remove is not None:
            self.on_remove(name)

    def _leave(self, parent: bytes) -> None:
        above = self._entries.get(parent)
        if above is not None:
            above.children -= 1
            self._offer(parent, above)
