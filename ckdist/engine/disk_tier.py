"""The prompt cache on disk, as rank 0 decides about it: it stores shared blocks, and loads prefixes of prompts.

A block is stored once it is shared, in the background, so that its eviction from memory loses nothing. All ranks copy
the same slots in the same order, while steps run. An entry exists once every rank has confirmed it. A copy that
fails on a rank is a miss for all.

The name of a block is a hash of its parent's name and its tokens. The parent of a first block is the root of its
tenant, an HMAC with a secret of the folder.
"""

import hashlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckdist import native
from ckdist.engine.block_pool import ROOT, TOKEN_BYTES, BlockPool
from ckdist.engine.disk_index import DiskIndex
from ckdist.engine.sequence import Sequence
from ckdist.engine.step_speed import StepSpeed
from ckdist.program.executable import SLABS, Executable
from ckdist.program.step_batch import BLOCK_TOKENS

if TYPE_CHECKING:
    from ckdist.engine.disk_cache import DiskCache

log = logging.getLogger(__name__)

NAME_BYTES = 32
COPY = native.dtype("ckdist_block_copy")
COPIES_MOST = native.lib.ckdist_copies_most
COMMANDS_MOST = native.lib.ckdist_results_kept // 2  # commands under way, whose results every rank keeps
STORE_BYTES = 8 << 20  # on all ranks, of one command that stores
STORES_MOST = 4  # such commands under way
POOL_SHARE = 8  # at most 1 / POOL_SHARE of the pool's blocks is being stored
LOAD_POLL, STORE_POLL = 0.001, 0.01  # seconds between two questions to the ranks
STAGES_FACTOR = 20


class Named(NamedTuple):
    """The identity of a block in memory."""

    name: bytes
    parent: bytes
    tokens: bytes
    depth: int
    before: int  # block before it, or ROOT


NO_NAME = Named(b"", b"", b"", 0, ROOT)


class Copy(NamedTuple):
    """One entry on its way between the cache and the slabs."""

    identity: Named
    kind: str
    place: int  # block of the cache, or slot of states
    slot: int  # of the slab
    block: int  # of the cache, which the entry is or follows
    generation: int = 0


@dataclass(slots=True)
class Job:
    """Copies in one direction, parents first.

    Attributes:
        issued: Copies that commands have been sent for.
        good: Leading copies that every rank has done.
        pending: Commands under way.
    """

    copies: list[Copy]
    issued: int = 0
    good: int = 0
    pending: int = 0
    failed: bool = False


@dataclass(slots=True)
class Load(Job):
    """The load of a prefix. The first of its sequences began it.

    Attributes:
        prefix: Known blocks before the loaded ones, which it holds.
    """

    sequences: list[Sequence] = field(default_factory=list[Sequence])
    prefix: list[int] = field(default_factory=list[int])
    tenant: bytes = b""
    begun: float = 0.0


class DiskTier:
    """Stores and loads entries of one executable. One thread uses it."""

    def __init__(self, cache: "DiskCache", executable: Executable, pool: BlockPool, speed: StepSpeed) -> None:
        self.cache, self._executable, self._pool, self._states = cache, executable, pool, pool.states
        self._speed = speed
        speed.start_seconds = cache.token_seconds
        self._index, self._state_index = DiskIndex(cache.slots["blocks"]), DiskIndex(cache.slots.get("states", 0))
        self._index.restore(cache.found["blocks"])
        states = [found for found in cache.found.get("states", []) if found.name in self._index]
        self._state_index.restore([found._replace(depth=0, parent=b"") for found in states])
        self._index.on_remove = self._state_index.drop
        self._indices = {"blocks": self._index, "states": self._state_index}
        self._seconds = dict(cache.entry_seconds)
        self._roots: dict[bytes, bytes] = {}
        self._names = [NO_NAME] * pool.num_blocks  # of known blocks
        self._to_store: deque[tuple[int, bytes]] = deque()  # (block, name)
        self._to_keep: list[tuple[int, int]] = []  # (slot, block) of snapshots
        self._jobs: deque[tuple[int, Job, int]] = deque()  # (number, job, its copies) of each command under way
        self._loads: list[Load] = []  # that have not ended
        self._loading: dict[bytes, Load] = {}  # by the names of the blocks on their way
        self._is_storing = True
        self._next_poll = 0.0
        self._counts = dict.fromkeys(
            ("stored_blocks", "stored_bytes", "loaded_tokens", "loaded_bytes", "loads", "damaged", "write_errors"), 0
        )
        self._load_seconds = 0.0
        pool.on_share = self._on_share
        if self._states is not None:
            self._states.on_keep = lambda slot, block: self._to_keep.append((slot, block))

    @property
    def loading(self) -> int:
        """Sequences that wait for a load."""
        return sum(len(load.sequences) for load in self._loads)

    @property
    def resumes(self) -> bool:
        """True if a stream of a lost engine waits for a load."""
        return any(sequence.resumes for load in self._loads for sequence in load.sequences)

    @property
    def is_busy(self) -> bool:
        """True if copies are under way, or entries are to be stored."""
        return bool(self._jobs or self._loads or self._to_store) or any(map(self._is_idle, self._to_keep))

    def is_due(self) -> bool:
        """True if `tend` should be called now."""
        return self.is_busy and time.monotonic() >= self._next_poll

    def tend(self) -> list[Sequence]:
        """Handles copies that have ended and begins others. No step may be in flight.

        Returns:
            The sequences that need not wait any longer.
        """
        ready = self._collect() if self._jobs else []
        self._issue_loads()
        self._issue_stores()
        # With stages, rank 0 must wait for the steps under way before it asks.
        factor = 1 if self._executable.in_flight == 1 else STAGES_FACTOR
        self._next_poll = time.monotonic() + factor * (LOAD_POLL if self._loads else STORE_POLL)
        return ready

    def begin_load(self, sequence: Sequence, tokens: np.ndarray, prefix: list[int], used: int) -> bool:
        """Begins to load the continuation of a sequence's prefix if that is predicted to be faster than computing it.

        Args:
            tokens: The sequence as blocks are named, as far as it may be reused: int32 (n,).
            prefix: The known blocks at its beginning.
            used: Number of these that it can begin with: fewer than all if a state is missing.

        Returns:
            Whether the sequence now waits for a load. `sequence.cache_use.end` says why not.
        """
        use, tenant = sequence.cache_use, sequence.tenant
        assert tenant is not None  # others have no names
        chain = self._chain(tenant, tokens)
        self._index.touch(item.name for item in chain)
        self._state_index.touch(item.name for item in chain[:used])
        if use.has_loaded:
            return False
        count = len(prefix)
        if count < len(chain) and (load := self._loading.get(chain[count].name)) is not None:
            load.sequences.append(sequence)
            return True
        while count < len(chain) and self._index.stored(chain[count].name) is not None:
            count += 1
        if self._states is not None:
            found = [d for d in range(used, count) if self._state_index.stored(chain[d].name) is not None]
            count = found[-1] + 1 if found else 0
        if count <= used:
            return False
        prefix, missing = prefix[:count], chain[len(prefix) : count]
        seconds = len(missing) * self._seconds["blocks"] + (self._seconds["states"] if self._states else 0.0)
        if seconds >= self._speed.prompt_seconds(used * BLOCK_TOKENS, (count - used) * BLOCK_TOKENS):
            use.end = "computing is faster"
            return False
        lacks_slot = self._states is not None and self._states.available < 2  # its own, and this one
        if lacks_slot or len(missing) + self._pool.idle_among(prefix) > self._pool.available:
            use.end = "no room"
            return False
        self._begin(sequence, tenant, prefix, missing, chain[count - 1])
        return True

    def cancel(self, sequence: Sequence) -> None:
        """Forgets a sequence that waits for a load. The load goes on."""
        for load in self._loads:
            if sequence in load.sequences:
                load.sequences.remove(sequence)

    def finish(self, seconds: float) -> None:
        """Waits until everything is stored, or for `seconds`. No step may be in flight, and no sequence may wait."""
        end = time.monotonic() + seconds
        while self.is_busy and time.monotonic() < end:
            self.tend()
            time.sleep(LOAD_POLL)

    def stats(self) -> dict[str, float]:
        """Counters since the start (`*_total`) and gauges."""
        return {
            "disk_blocks": len(self._index),
            "disk_blocks_most": self._index.capacity,
            "disk_states": len(self._state_index),
            "disk_evicted_total": self._index.evicted + self._state_index.evicted,
            "disk_load_seconds_total": self._load_seconds,
            "disk_requests_loading": self.loading,
            **{f"disk_{name}_total": count for name, count in self._counts.items()},
        }

    # names

    def _root(self, tenant: bytes) -> bytes:
        root = self._roots.get(tenant)
        if root is None:
            root = hashlib.blake2b(tenant, key=self.cache.secret, digest_size=NAME_BYTES).digest()
            self._roots[tenant] = root
        return root

    def _chain(self, tenant: bytes, tokens: np.ndarray) -> list[Named]:
        """The names of the full blocks of `tokens`."""
        name, data, chain = self._root(tenant), tokens.tobytes(), list[Named]()
        size = BLOCK_TOKENS * TOKEN_BYTES
        for begin in range(0, len(data) - size + 1, size):
            chain.append(_child(name, data[begin : begin + size], len(chain), ROOT))
            name = chain[-1].name
        return chain

    def _on_share(self, blocks: list[int], parent: int, tokens: list[bytes], tenant: bytes) -> None:
        name, depth = self._root(tenant), 0
        if parent != ROOT:
            name, depth = self._names[parent].name, self._names[parent].depth + 1
        for block, own in zip(blocks, tokens, strict=True):
            named = self._names[block] = _child(name, own, depth, parent)
            self._to_store.append((block, named.name))
            name, depth, parent = named.name, depth + 1, block

    # loads

    def _begin(self, sequence: Sequence, tenant: bytes, prefix: list[int], missing: list[Named], last: Named) -> None:
        """Begins to load the blocks `missing` after `prefix`, and the state after the block `last`."""
        self._pool.hold(prefix)
        copies = list[Copy]()
        for named, block in zip(missing, self._pool.allocate(len(missing)), strict=True):
            entry = self._index.stored(named.name)
            assert entry is not None  # begin_load has found it
            copies.append(Copy(named, "blocks", block, entry.slot, block))
        if self._states is not None:
            entry = self._state_index.stored(last.name)
            assert entry is not None  # begin_load has found it
            block = copies[-1].block if copies else prefix[-1]
            copies.append(Copy(last, "states", self._states.allocate(), entry.slot, block))
        load = Load(copies, sequences=[sequence], prefix=prefix, tenant=tenant, begun=time.monotonic())
        self._loads.append(load)
        self._loading.update((named.name, load) for named in missing)
        self._issue_loads()
        self._next_poll = 0.0

    def _issue_loads(self) -> None:
        for load in self._loads:
            while not load.failed and load.issued < len(load.copies) and len(self._jobs) < COMMANDS_MOST:
                self._send(load, into_cache=True)

    def _end_load(self, load: Load) -> list[Sequence]:
        """Makes the loaded blocks known. Returns the sequences that waited for them."""
        self._loads.remove(load)
        blocks = [copy for copy in load.copies if copy.kind == "blocks"]
        for copy in blocks:
            del self._loading[copy.identity.name]
        good = blocks[: load.good]
        parent = load.prefix[-1] if load.prefix else ROOT
        tokens = b"".join(copy.identity.tokens for copy in good)
        shared = self._pool.share([copy.block for copy in good], parent, tokens, load.tenant)
        self._pool.release([copy.block for copy in blocks[load.good :]])
        if self._states is not None:
            slot = load.copies[-1].place
            if load.good == len(load.copies):
                *before, last = load.prefix + shared
                self._states.keep(slot, last, before)
            else:
                self._states.release(slot)
        self._pool.release(load.prefix + shared)
        seconds = time.monotonic() - load.begun
        read = sum(self.cache.entry_bytes[copy.kind] for copy in load.copies[: load.good])
        for sequence in load.sequences:
            use = sequence.cache_use
            use.loaded, use.loaded_bytes, use.load_seconds = len(good) * BLOCK_TOKENS, read, seconds
        if load.sequences:
            load.sequences[0].cache_use.has_loaded = load.good > 0
        self._counts["loads"] += 1
        self._counts["loaded_tokens"] += len(good) * BLOCK_TOKENS
        self._counts["loaded_bytes"] += read
        self._load_seconds += seconds
        return load.sequences

    def _measure(self, copies: list[Copy], seconds: float) -> None:
        """Corrects the predicted seconds of an entry by a command's."""
        ratio = seconds / max(1e-9, sum(self._seconds[copy.kind] for copy in copies))
        for kind in self._seconds:
            self._seconds[kind] *= ratio**0.5  # half of the way, in powers: the first prediction may be far off

    # stores

    def _is_idle(self, snapshot: tuple[int, int]) -> bool:
        """True if no sequence uses the block before a snapshot, or the snapshot is gone."""
        slot, block = snapshot
        states = self._states
        return states is None or states.slot_after(block) != slot or self._pool.idle_among([block]) > 0

    def _issue_stores(self) -> None:
        if not self._is_storing:
            self._to_store.clear()
            self._to_keep.clear()
            return
        stores = [job for _, job, _ in self._jobs if not isinstance(job, Load)]
        room = max(1, self._pool.num_blocks // POOL_SHARE) - sum(len(job.copies) for job in stores)
        for _ in range(STORES_MOST - len(stores)):
            if room <= 0 or len(self._jobs) >= COMMANDS_MOST:
                break
            copies = self._next_blocks(room) or self._next_states(room)
            if not copies:
                break
            room -= len(copies)
            self._send(Job(copies), into_cache=False)

    def _next_blocks(self, room: int) -> list[Copy]:
        """Takes blocks from the queue that are not on disk, parents first, and holds them."""
        copies, queue = list[Copy](), self._to_store
        most = min(room, COPIES_MOST, max(1, STORE_BYTES // self.cache.entry_bytes["blocks"]))
        while queue and len(copies) < most:
            block, name = queue.popleft()
            named = self._names[block]
            if not self._pool.is_known(block) or named.name != name or name in self._index:
                continue
            if named.before != ROOT and named.parent not in self._index:  # the disk has lost its parent
                if self._pool.is_known(named.before) and self._names[named.before].name == named.parent:
                    queue.extendleft(((block, name), (named.before, named.parent)))
                continue  # memory has lost it, too: the block cannot be found again
            slot = self._index.reserve(name, named.parent)
            if slot is None and (copies or self._jobs):
                queue.appendleft((block, name))
                break
            if slot is None:  # every entry on disk has children
                queue.clear()
                break
            self._pool.hold([block])
            copies.append(Copy(named, "blocks", block, slot, block, self._index.generation(name)))
        return copies

    def _next_states(self, room: int) -> list[Copy]:
        """Takes snapshots after blocks on disk that no sequence uses, and holds them."""
        copies, states = list[Copy](), self._states
        if states is None or not self._state_index.capacity:
            return []
        most = min(room, COPIES_MOST, max(1, STORE_BYTES // self.cache.entry_bytes["states"]))
        idle = [item for item in self._to_keep if self._is_idle(item)]
        for slot, block in idle[:most]:
            self._to_keep.remove((slot, block))
            named = self._names[block]
            if states.slot_after(block) != slot or named.name in self._state_index or named.name not in self._index:
                continue
            place = self._state_index.reserve(named.name, b"")
            if place is None:
                continue
            self._pool.hold([block])
            states.hold(slot)
            copies.append(Copy(named, "states", slot, place, block, self._state_index.generation(named.name)))
        return copies

    def _end_store(self, job: Job) -> None:
        for i, (named, kind, place, slot, block, _) in enumerate(job.copies):
            if i < job.good:
                self._indices[kind].confirm(named.name, slot)
                self._counts["stored_blocks"] += kind == "blocks"
                self._counts["stored_bytes"] += self.cache.entry_bytes[kind]
            else:
                self._indices[kind].drop(named.name)
            if kind == "states" and self._states is not None:
                self._states.remove_reader(place)
            self._pool.release([block])

    # commands

    def _send(self, job: Job, into_cache: bool) -> None:
        """Sends the next command of a job."""
        copies = job.copies[job.issued : job.issued + COPIES_MOST]
        rows = np.zeros(len(copies), COPY)
        entries = rows["entry"]
        rows["place"], rows["slot"] = [copy.place for copy in copies], [copy.slot for copy in copies]
        for name in ("name", "parent", "tokens"):
            data = b"".join(getattr(copy.identity, name) for copy in copies)
            entries[name] = np.frombuffer(data, np.int32).reshape(len(copies), -1)
        entries["depth"] = [copy.identity.depth for copy in copies]
        entries["kind"] = [SLABS[copy.kind] for copy in copies]
        generations = b"".join(copy.generation.to_bytes(8, "little") for copy in copies)
        entries["generation"] = np.frombuffer(generations, np.int32).reshape(len(copies), -1)
        number = self._executable.copy_blocks(rows, into_cache)
        self._jobs.append((number, job, len(copies)))
        job.issued += len(copies)
        job.pending += 1

    def _collect(self) -> list[Sequence]:
        """Handles the commands that have ended on every rank. Returns the sequences whose load has ended."""
        ranks, ready = self._executable.worker.copy_results(), list[Sequence]()
        ended = int(ranks["ended"].min())
        while self._jobs and self._jobs[0][0] <= ended:
            number, job, count = self._jobs.popleft()
            rows = ranks["results"][:, number % native.lib.ckdist_results_kept]
            good, seconds = int(rows["good"].min()), int(rows["nanoseconds"].max()) * 1e-9
            job.pending -= 1
            if not job.failed:
                job.good += good
                job.failed = good < count
                if job.failed:
                    self._report(job, int(rows["error"].max()))
                elif isinstance(job, Load):
                    self._measure(job.copies[job.good - count : job.good], seconds)
            if not isinstance(job, Load):
                self._end_store(job)
            elif not job.pending and (job.failed or job.issued == len(job.copies)):
                ready += self._end_load(job)
        return ready

    def _report(self, job: Job, error: int) -> None:
        """Handles the first copy of a job that failed on a rank."""
        path, why = self.cache.folder.path, os.strerror(error)
        if isinstance(job, Load):
            copy = job.copies[job.good]
            self._indices[copy.kind].drop(copy.identity.name)
            self._counts["damaged"] += 1
            if self._counts["damaged"] == 1:
                log.warning("--cache-disk: %s has damaged blocks (%s), which are computed again", path, why)
            return
        self._counts["write_errors"] += 1
        if self._is_storing:
            self._is_storing = False
            log.warning("--cache-disk: %s cannot be written (%s); from now on no prompt is stored there", path, why)


def _child(parent: bytes, tokens: bytes, depth: int, before: int) -> Named:
    return Named(hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES).digest(), parent, tokens, depth, before)
