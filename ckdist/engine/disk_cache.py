"""Opens the prompt cache on disk of a job: its folder, its sizes and the entries that every rank has.

All ranks of a world call `open_disk_cache` together.
"""

import hashlib
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from ckdist import native
from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.comm.user_cache import read_kept, write_kept
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig, folder_and_size
from ckdist.engine.cache_folder import FORMAT, CacheFolder
from ckdist.engine.loaded_model import Model
from ckdist.engine.prefill_measurement import layer_seconds, prompt
from ckdist.errors import ConfigError
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.program.executable import DECODE, SLABS
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.weights.model_files import ModelFile, model_files

log = logging.getLogger(__name__)

STATES_SHARE = 0.5  # part of the size that states of sequences get, if layers keep states
SAMPLE_SLOTS = 8  # slots that are read to measure the disk
UNMEASURED_RATE = 500e6  # bytes/s on one rank, of a cache that is still empty
SLOW_BYTES = 4 << 30  # a line announces that a larger file is read
UNMEASURED_TOKEN = 0.1  # seconds, in stages and after a restart, until the first step with prompts has been measured
MEASURED_TOKENS = 256


class FoundEntry(NamedTuple):
    """An entry that every rank has."""

    depth: int
    generation: int
    slot: int
    name: bytes
    parent: bytes


@dataclass
class DiskCache:
    """The cache on disk of a rank. Rank 0 uses all fields, other ranks only the folder.

    Attributes:
        secret: Makes the names of tenants.
        slots: By kind of entry.
        found: By kind: the entries from earlier jobs.
        entry_bytes: By kind: bytes on disk on all ranks.
        entry_seconds: By kind: predicted seconds of reading one entry.
        token_seconds: Predicted seconds of computing one token of a prompt.
    """

    folder: CacheFolder
    secret: bytes
    slots: dict[str, int]
    found: dict[str, list[FoundEntry]]
    entry_bytes: dict[str, int]
    entry_seconds: dict[str, float]
    token_seconds: float

    def __str__(self) -> str:
        total = sum(self.slots[kind] * size for kind, size in self.entry_bytes.items())
        return (
            f"cache on disk: {self.folder.path}, at most {gigabytes(total)} for {self.slots['blocks'] * BLOCK_TOKENS} "
            f"tokens, {len(self.found['blocks']) * BLOCK_TOKENS} of them there"
        )


def open_disk_cache(place: str, config: EngineConfig, model: Model) -> DiskCache:
    """Opens the cache at `place`, DIR[:SIZE]. A collective call.

    Raises:
        ConfigError: The folder cannot be used, or it is too small.
    """
    if not model.spec.generates or model.spec.encoder is not None:
        raise ConfigError(f"--cache-disk is for decoders, and {model.checkpoint.path} has an encoder; leave it out")
    directory, size = folder_and_size(place, "--cache-disk")
    world, executable = model.world, model.executable
    key = folder_key(config, model)
    own = {kind: executable.slab_bytes(kind) for kind in SLABS}
    folder = together(world, lambda: CacheFolder.open(directory, key))
    try:
        return _filled(folder, size, own, model)
    except BaseException:
        folder.close()
        raise


def _filled(folder: CacheFolder, size: int | None, own: Mapping[str, int], model: Model) -> DiskCache:
    """The cache in an open folder. `own`: by kind, bytes of an entry on this rank."""
    world, executable = model.world, model.executable
    sizes: list[dict[str, int]] = world.gather(own)
    kinds = [kind for kind in SLABS if any(sizes_of[kind] for sizes_of in sizes)]
    together(world, lambda: [folder.add_slab(kind, world.rank, world.size, own[kind]) for kind in kinds])
    slots = count_slots(world, folder, size)
    about = {
        "model": str(model.checkpoint.path),
        "ranks": world.size,
        "types": list(model.plan.cache.types),
        "block_tokens": BLOCK_TOKENS,
        "bytes": sizes,
    }

    def prepare() -> bytes:
        """Sets the sizes of the files and writes the facts. Returns the secret on rank 0."""
        for kind in kinds:
            folder.resize(kind, slots[kind])
        if world.local_rank == 0:
            folder.describe(about)
        return folder.secret() if world.rank == 0 else b""

    secret = together(world, prepare)
    for kind in kinds:
        files = folder.slabs[kind]
        executable.set_slab(kind, files.headers, files.data, files.slots)
    found = {kind: agreed_entries(world, folder, kind) for kind in kinds}
    entry_bytes = {kind: sum(world.gather(folder.slabs[kind].bytes_on_disk)) for kind in kinds}
    seconds = {kind: max(world.gather(read_seconds(folder, kind))) for kind in kinds}
    cache = DiskCache(folder, secret, slots, found, entry_bytes, seconds, token_seconds(model))
    if world.rank == 0:
        log.info("%s", cache)
    return cache


def folder_key(config: EngineConfig, model: Model) -> str:
    """The hash of everything that the bytes of a block depend on, other than its tokens. A collective call."""
    world, executable = model.world, model.executable
    hosts = [world.hosts.index(host) for host in world.hosts]
    built = hashlib.sha256(native.LIBRARY.read_bytes()).hexdigest()
    # From 17 threads on, sums over columns may have parts, whose number depends on the threads.
    threads = max(executable.worker.pool.threads, 16)
    own = [native.isa(), built, repr(sorted(executable.caches.items())), executable.slab_bytes("blocks"), threads]
    parts = {
        "format": FORMAT,
        "model": together(world, lambda: content_digest(model, config) if world.rank == 0 else ""),
        "overrides": list(config.override_kv),
        "quantize": config.quantize,
        "types": list(model.plan.cache.types),
        "roles": executable.splits_roles,
        "hosts": hosts,
        "experts": config.experts,
        "shares": list(model.plan.mesh.shares),
        "ranks": world.gather(own),
    }
    parts["model"] = world.broadcast(parts["model"])
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def content_digest(model: Model, config: EngineConfig) -> str:
    """A digest of all bytes of the model's files and of its adapter, which is computed once and then kept.

    The version of a file at a URL counts, since this host may have only parts of it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in model_files(model.checkpoint, pathlib.Path(config.fixed_adapter) if config.fixed_adapter else None):
        digest.update(f"{file.name} {file.size} {file.version or _whole_digest(file)}\n".encode())
    return digest.hexdigest()


def _whole_digest(file: ModelFile) -> str:
    status = file.status
    identity = [str(file.path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]
    name = f"digests/{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"
    kept = read_kept(name)
    if isinstance(kept, str):
        return kept
    if file.size > SLOW_BYTES:
        log.info("--cache-disk: reading %s once, to know it again", file.path)
    found = f"{file.digest((0, file.size)):016x}"
    write_kept(name, found)
    return found


def count_slots(world: World, folder: CacheFolder, size: int | None) -> dict[str, int]:
    """Divides the size among the ranks of each host and the kinds of entries. A collective call.

    Args:
        size: Most bytes of the folder on one host. None: half of the bytes that would be free without it.

    Raises:
        ConfigError: There is no room for one entry.
    """
    each = {kind: files.bytes_on_disk for kind, files in folder.slabs.items()}
    rows = world.gather([world.hosts[world.rank], each, folder.used_bytes(), folder.free_bytes()])
    slots = dict[str, int]()
    for kind in each:
        share = STATES_SHARE if len(each) > 1 else 1.0
        for host in dict.fromkeys(world.hosts):
            there = [row for row in rows if row[0] == host]
            limit = size if size is not None else (sum(row[2] for row in there) + there[0][3]) // 2
            needed = sum(row[1][kind] for row in there)
            most = int(limit * share) // needed
            if most == 0:
                raise ConfigError(
                    f"--cache-disk: {gigabytes(limit)} on {host} hold no entry of {gigabytes(needed)}; "
                    f"give at least {math.ceil(needed / share)} bytes, e.g. {folder.path.parent}:10G"
                )
            slots[kind] = min(slots.get(kind, most), most, (1 << 31) - 1)
    return slots


def agreed_entries(world: World, folder: CacheFolder, kind: str) -> list[FoundEntry]:
    """The entries that every rank has in the same slot. A collective call."""
    slots, headers = folder.slabs[kind].entries()
    entries = headers["entry"]
    own = [(slot, xxh3_64_intdigest(entry.tobytes())) for slot, entry in zip(slots.tolist(), entries, strict=True)]
    rows = world.gather(np.array(own, np.uint64).tobytes())
    if world.rank:
        return []
    pairs = [set(map(tuple, np.frombuffer(row, np.uint64).reshape(-1, 2).tolist())) for row in rows]
    common = {slot for slot, _ in set.intersection(*pairs)}
    kept = np.isin(slots, list(common)) & (entries["kind"] == SLABS[kind]) & (entries["depth"] >= 0)
    return found_entries(slots[kept], entries[kept])


def found_entries(slots: np.ndarray, entries: np.ndarray) -> list[FoundEntry]:
    """Decodes `entries`, the headers in `slots`."""
    return [
        FoundEntry(
            int(entry["depth"]),
            int.from_bytes(entry["generation"].tobytes(), "little"),
            slot,
            entry["name"].tobytes(),
            entry["parent"].tobytes(),
        )
        for slot, entry in zip(slots.tolist(), entries, strict=True)
    ]


def read_seconds(folder: CacheFolder, kind: str) -> float:
    """Seconds of reading one entry on this rank: measured, or estimated if the folder has no entries."""
    files = folder.slabs[kind]
    slots, _ = files.entries()
    if not len(slots):
        return files.bytes / UNMEASURED_RATE
    sample = slots[:: max(1, len(slots) // SAMPLE_SLOTS)][:SAMPLE_SLOTS].tolist()
    memory = [bytearray(files.bytes) for _ in sample]  # untouched, as blocks of the cache are at first
    begin = time.monotonic()
    for slot, row in zip(sample, memory, strict=True):
        os.preadv(files.data, [row], slot * files.stride)
    return (time.monotonic() - begin) / len(sample)


def token_seconds(model: Model) -> float:
    """Measured seconds of one token of a prompt without context: those of the first layer, times the layers.

    A collective call while the cache is empty.
    """
    executable, world = model.executable, model.world
    if executable.stages is not None:  # a layer cannot run alone
        return UNMEASURED_TOKEN
    seconds = UNMEASURED_TOKEN
    with model.loader.held():
        if world.rank:
            executable.work()
        elif AGAIN in os.environ:  # requests wait, and what they need is on disk
            executable.stop()
        else:
            size = min(executable.max_tokens, executable.context_length, MEASURED_TOKENS)
            size = min(size, executable.num_blocks * BLOCK_TOKENS)
            layer_seconds(executable, prompt(executable, size), DECODE)  # packs the layer
            seconds = layer_seconds(executable, prompt(executable, size), DECODE) * len(model.spec.layers) / size
            executable.stop()
    executable.stats(reset=True)  # measured steps do not count
    return seconds
