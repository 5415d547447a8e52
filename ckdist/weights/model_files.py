"""The files of a model, and their sampled blocks, which ranks compare at start."""

import contextlib
import functools
import io
import os
import pathlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ckdist.errors import ModelFileError
from ckdist.hub.folder_files import BESIDE, CONFIG
from ckdist.hub.local_copy import has_parts
from ckdist.layout import Range
from ckdist.regular_file import open_regular
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.safetensors import read_safetensors

BLOCK = 4096  # bytes of one sampled block
HEADER_BYTES = 128 << 20  # compared at most before the first tensor
BLOCKS_OF_TENSOR = 64  # most blocks of one tensor, evenly from its first byte to its last
SAMPLED_BLOCKS = 8192  # blocks of the tensors of all files; more only if each tensor has one block
READERS = 16  # threads: a disk or a file server handles many small reads at once
READ_BYTES = 1 << 20  # bytes hashed at once, so that they are still in the core's cache
TEMPLATES = "additional_chat_templates"
NETWORK_FILES = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre")  # file systems whose mounts name a server and folder


@dataclass(frozen=True)
class ModelFile:
    """One file of a model or of its adapter.

    Attributes:
        name: The same on all hosts, independent of the folder.
        tensors: First byte and name of each tensor, ascending. Empty if the file has no weights.
        held: Byte ranges of small tensors that the model's spec holds.
    """

    name: str
    path: pathlib.Path
    tensors: tuple[tuple[int, str], ...] = ()
    held: tuple[Range, ...] = ()

    @cached_property
    def status(self) -> os.stat_result:
        """The result of stat. Raises ModelFileError if the file does not exist any more."""
        try:
            return self.path.stat()
        except OSError as error:
            raise self._unreadable(error) from None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.status.st_size

    @cached_property
    def is_partial(self) -> bool:
        """True if this host fetches only the needed parts of the file from a URL."""
        return has_parts(self.path)

    @property
    def version(self) -> str:
        """The server's version stamp for a file at a URL, else empty."""
        if not self.is_partial:
            return ""
        from ckdist.hub.remote_file import stamp_of

        return stamp_of(self.path)

    def identity(self) -> list[str | int]:
        """A key that is equal on two ranks only if they read the same file, on one machine or from one file server."""
        device = os.major(self.status.st_dev), os.minor(self.status.st_dev)
        return [network_source(*device) or f"{machine_boot()} {device}", self.status.st_ino, self.size]

    def tensor_at(self, byte: int) -> str:
        """The name of the tensor that contains a byte; empty for bytes before the first tensor."""
        index = np.searchsorted([first for first, _ in self.tensors], byte, side="right")
        return self.tensors[index - 1][1] if index else ""

    def sample(self, files: int) -> np.ndarray:
        """The first bytes of the sampled blocks, int64 (n,), ascending. `files` is the number of files of the model.

        All blocks of a file without weights and of a header, and some blocks of each tensor. Only the header of a file
        at a URL.
        """
        if not self.tensors:
            return np.arange(0, self.size, BLOCK)
        firsts = np.array([first for first, _ in self.tensors], np.int64)
        parts = [np.arange(0, min(int(firsts[0]), HEADER_BYTES), BLOCK)]
        if not self.is_partial:
            count = max(1, min(BLOCKS_OF_TENSOR, SAMPLED_BLOCKS // (len(firsts) * files)))
            lasts = np.append(firsts[1:], self.size) - 1
            steps = np.arange(count)
            inside = firsts[:, None] + (lasts - firsts)[:, None] * steps // max(1, count - 1)
            parts += [inside.ravel(), *(np.arange(begin, end, BLOCK) for begin, end in self.held)]
        # np.unique would import numpy.ma, which takes a twentieth of a rank's start
        begins = np.sort(np.concatenate(parts) // BLOCK * BLOCK)
        return begins[np.diff(begins, prepend=-1) > 0]

    def digests(self, begins: np.ndarray) -> np.ndarray:
        """XXH3 of the blocks at `begins`, uint64 (n,). Raises ModelFileError if the file cannot be read."""
        if self.is_partial:
            from ckdist.hub.remote_file import fetch_ranges

            fetch_ranges(self.path, [(0, self.tensors[0][0] if self.tensors else self.size)])
        with self.opened() as file, ThreadPoolExecutor(READERS, "sample") as pool:
            descriptor, slices = file.fileno(), np.array_split(begins, min(READERS, max(1, len(begins))))
            read = lambda part: [xxh3_64_intdigest(os.pread(descriptor, BLOCK, begin)) for begin in part.tolist()]
            return np.array([value for values in pool.map(read, slices) for value in values], np.uint64)

    def digest(self, span: Range) -> int:
        """XXH3 of bytes [begin, end). Raises ModelFileError if the file cannot be read."""
        state, (at, end) = xxh3_64(), span
        buffer = memoryview(bytearray(READ_BYTES))
        with self.opened() as file:
            while at < end:
                count = os.preadv(file.fileno(), [buffer[: min(READ_BYTES, end - at)]], at)
                if not count:
                    raise ModelFileError(f"{self.path} has become shorter: it ends at byte {at}")
                state.update(buffer[:count])
                at += count
        return state.intdigest()

    def block(self, begin: int) -> bytes:
        """Reads one block."""
        with self.opened() as file:
            return os.pread(file.fileno(), BLOCK, begin)

    @contextlib.contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Opens the file for reading. Raises ModelFileError if it cannot be read."""
        try:
            with open_regular(self.path) as file:
                yield file
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> ModelFileError:
        return ModelFileError(f"{self.path} cannot be read: {error.strerror or error}")


def model_files(checkpoint: Checkpoint, adapter: pathlib.Path | None = None) -> list[ModelFile]:
    """The files of a model and of its adapter, in the same order on all hosts. `adapter` is a folder."""
    firsts: dict[pathlib.Path, dict[int, str]] = {}
    for name, source in checkpoint.tensors.items():
        scales = (*source.scales.places, *source.scales.zeros) if source.scales else ()
        for path, first in (*source.places, *scales):
            firsts.setdefault(path, {}).setdefault(first, name)
    held = {path: tuple(span for file, span in checkpoint.held if file == path) for path in firsts}
    folder = checkpoint.path
    name_of = lambda path: (
        str(path.relative_to(folder)) if path.is_relative_to(folder) and path != folder else path.name
    )
    files = [ModelFile(name_of(p), p, tuple(sorted(found.items())), held[p]) for p, found in sorted(firsts.items())]
    if folder.is_dir():
        paths = [folder / name for name in (CONFIG, *BESIDE)] + sorted((folder / TEMPLATES).glob("*.jinja"))
        files += [ModelFile(name_of(p), p) for p in paths if p.is_file() and p not in firsts]
    if adapter is not None:
        from ckdist.weights.adapter_config import CONFIG as ADAPTER_CONFIG
        from ckdist.weights.adapter_file import WEIGHTS as ADAPTER_WEIGHTS

        weights = adapter / ADAPTER_WEIGHTS
        tensors = sorted((t.offset, t.name) for t in read_safetensors(weights).values())
        files.append(ModelFile(f"adapter {ADAPTER_CONFIG}", adapter / ADAPTER_CONFIG))
        files.append(ModelFile(f"adapter {ADAPTER_WEIGHTS}", weights, tuple(tensors)))
    return files


@functools.cache
def machine_boot() -> str:
    """A unique name of this machine since its boot."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def network_source(major: int, minor: int) -> str:
    """The file server and its folder behind a device number; empty for a local device."""
    try:
        lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, described = line.partition(" - ")
        kind, source, *_ = described.split()
        if mount.split()[2] == f"{major}:{minor}" and kind in NETWORK_FILES:
            return f"{kind} {source}"
    return ""
