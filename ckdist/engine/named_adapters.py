"""The adapters that requests name. Rank 0 loads them into slots while steps run, and the other ranks follow.

A load is a command and a thread on each rank, which alone uses the World meanwhile. It writes a slot that no step
reads: rank 0 gives a slot to requests after all ranks have loaded it, and again only after these have ended.
"""

import logging
import struct
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckdist.comm.world_protocol import World, has_mpi
from ckdist.errors import ConfigError, RequestError, UnknownAdapterError
from ckdist.program.native_worker import NativeWorker
from ckdist.program.ops.low_rank import most_adapters
from ckdist.weights.adapter_slots import AdapterSlots
from ckdist.worker.load_world import LoadWorld

log = logging.getLogger(__name__)


@dataclass
class NamedAdapter:
    """An adapter in a slot.

    Attributes:
        digest: A digest of its files.
        users: Unfinished requests with it.
    """

    name: str
    slot: int
    digest: bytes
    users: int = 0


@dataclass(frozen=True)
class AdapterUse:
    """One of a request's adapters. `scale` multiplies its products."""

    adapter: NamedAdapter
    scale: float

    @property
    def slot(self) -> int:
        return self.adapter.slot

    @property
    def digest(self) -> bytes:
        """Requests of one digest share blocks of the prefix cache."""
        return self.adapter.digest + (b"" if self.scale == 1 else struct.pack("<d", self.scale))


class AdapterLoad:
    """A load in a thread of its own.

    Attributes:
        digest: Digest of the adapter's files. It is empty before the end, and if a rank could not load it.
        reason: Why a rank could not load it.
    """

    def __init__(
        self, world: World, slots: AdapterSlots, name: str = "", request: tuple[int, str] | None = None
    ) -> None:
        self.name, self.slot = name, request[0] if request else -1
        self.digest, self.reason = b"", ""
        self._arguments = LoadWorld(world), slots, request
        self._thread = threading.Thread(target=self._run, name="load of an adapter", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        world, slots, request = self._arguments
        try:
            self.digest = load_together(world, slots, request)
        except Exception as error:
            self.reason = world.fail(error)


def load_together(world: LoadWorld, slots: AdapterSlots, request: tuple[int, str] | None) -> bytes:
    """Loads rank 0's `request`, (slot, folder), on every rank. A collective call. Returns the digest of the files.

    Raises:
        UserError: A rank cannot load it, or the files differ between hosts.
    """
    slot, folder = world.broadcast(request)
    digest, notes = slots.load(slot, Path(folder))
    for rank, other in enumerate(world.gather(digest)):
        if other != digest:
            raise ConfigError(f"the files of {folder} differ between the hosts of ranks 0 and {rank}: copy them again")
    world.gather(None)  # every rank has compared
    for note in notes if world.rank == 0 else ():
        log.warning("%s: %s", folder, note)
    return digest


class Adapters:
    """The adapters of a job. All ranks make it together. Only rank 0's thread of steps calls the other methods.

    Args:
        named: Folders of the first adapters by name.
    """

    def __init__(self, world: World, slots: AdapterSlots, named: Mapping[str, str]) -> None:
        self._world, self.slots = world, slots
        self._by_name: dict[str, NamedAdapter] = {}
        self._ending: list[NamedAdapter] = []  # unloaded, with requests that still run
        self._load: AdapterLoad | None = None
        for slot, (name, folder) in enumerate(named.items()):
            load = LoadWorld(world)
            try:
                digest = load_together(load, slots, (slot, folder))
            except Exception as error:
                load.fail(error)
                raise
            self._by_name[name] = NamedAdapter(name, slot, digest)

    def use(self, scales: Collection[tuple[str, float]]) -> tuple[AdapterUse, ...]:
        """Counts a request. Returns its adapters in the order of their sum, which `scales` does not change.

        Raises:
            UnknownAdapterError: An adapter is not loaded.
            RequestError: These are more than `MOST_ADAPTERS`, or than there are slots.
        """
        if len(scales) > (most := most_adapters(self.slots.count)):
            raise RequestError(f"{len(scales)} adapters are named, and a request has at most {most}", "lora")
        uses = [AdapterUse(self._adapter(name), scale) for name, scale in scales]
        for use in uses:
            use.adapter.users += 1
        return tuple(sorted(uses, key=lambda use: use.digest))

    def _adapter(self, name: str) -> NamedAdapter:
        """Raises UnknownAdapterError."""
        adapter = self._by_name.get(name)
        if adapter is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise UnknownAdapterError(f"there is no adapter {name[:100]!r}; loaded are {known}", "model")
        return adapter

    def leave(self, uses: tuple[AdapterUse, ...]) -> None:
        """Counts the end of a request."""
        for use in uses:
            use.adapter.users -= 1
        self._ending = [other for other in self._ending if other.users]

    def begin_load(self, worker: NativeWorker, model: int, name: str, folder: str, replaces: bool = False) -> None:
        """Begins to load an adapter on every rank. No step may be in flight.

        Args:
            replaces: The name may be in use. Requests under way keep the adapter that they began with.

        Raises:
            RequestError: The name is in use, all slots are, or another load is under way.
        """
        if self._load is not None:
            raise RequestError(f"adapter {self._load.name!r} is being loaded; load the next one after it", "lora_name")
        if name in self._by_name and not replaces:
            raise RequestError(f"adapter {name!r} is loaded; unload it first, or set load_inplace", "lora_name")
        taken = {adapter.slot for adapter in (*self._by_name.values(), *self._ending)}
        free = [slot for slot in range(self.slots.count) if slot not in taken]
        if not free:
            ending = f", and {len(self._ending)} of them end with their requests" if self._ending else ""
            raise RequestError(
                f"all {self.slots.count} slots of --max-loras hold adapters{ending}: unload one first", "lora_name"
            )
        if has_mpi(self._world) and (level := self._world.mpi.Query_thread()) < self._world.mpi.THREAD_MULTIPLE:
            raise RequestError(
                f"this MPI allows thread level {level}, and {self._world.mpi.THREAD_MULTIPLE} (MPI_THREAD_MULTIPLE) "
                "is needed to load an adapter while steps run: name it at the start with --lora"
            )
        worker.send("adapt", model)
        self._load = AdapterLoad(self._world, self.slots, name, (free[0], folder))

    def take_load(self) -> AdapterLoad | None:
        """Returns the load that has ended since the last call, and makes its adapter one that requests may use."""
        load = self._load
        if load is None or not load.is_done:
            return None
        self._load = None
        if load.digest:
            if load.name in self._by_name:
                self.unload(load.name)
            self._by_name[load.name] = NamedAdapter(load.name, load.slot, load.digest)
        return load

    def unload(self, name: str) -> None:
        """Makes a name unknown. Requests with it go on. Raises UnknownAdapterError."""
        self._ending.append(self._adapter(name))
        del self._by_name[name]
        self.leave(())

    def follow(self) -> None:
        """Ranks other than 0: begins the load that rank 0 has begun."""
        self.close()  # rank 0 has seen the end of the load before
        self._load = AdapterLoad(self._world, self.slots)

    def close(self) -> None:
        """Waits for a load under way."""
        if self._load is not None:
            self._load.wait()

    def ids(self) -> dict[str, int]:
        """The number of each adapter, by name."""
        return {name: adapter.slot for name, adapter in self._by_name.items()}
