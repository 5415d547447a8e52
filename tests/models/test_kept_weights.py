"""Packed weights that the next start finds in memory: whole, in part, damaged, or those of something else."""

import os
import socket
import types

import numpy as np
import pytest

from ckdist.errors import ModelFileError
from ckdist.native import ffi, lib
from ckdist.weights.kept_weights import KeptWeights
from ckdist.weights.loader import ShardLoader
from ckdist.weights.tensor_source import TensorSource
from tests.support.checkpoints import WEIGHT, checkpoint_of

ROWS, COLUMNS = 2048, 1024  # 32 slices


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32).tobytes())
    return path


def no_ends():
    return socket.socketpair(type=socket.SOCK_DGRAM)


@pytest.fixture
def ends():
    return no_ends()


def started(file, ends, rows=(0, ROWS), until=1.0, quantize=None) -> types.SimpleNamespace:
    """A start whose packing ends at the part `until`."""
    loader = ShardLoader(checkpoint_of(file.parent, TensorSource(WEIGHT, 0, (ROWS, COLUMNS), file, 0)), 1, quantize)
    loader.kept = KeptWeights(*(end.dup() for end in ends))
    handle = loader.add_matrix(WEIGHT, [rows])
    found = loader.kept.find(loader)
    loader.open()
    kept = lib.ckdist_loader_kept_bytes(loader.native_open())
    if until < 1:
        loader.repack(until=until)
        loader.wait()
    else:
        loader.load(progress=False)
    own = loader._filled().stored_done
    packed = bytes(ffi.buffer(ffi.cast("char *", loader.arena), handle.bytes))
    return types.SimpleNamespace(loader=loader, handle=handle, found=found, kept=kept, own=own, packed=packed)


def test_a_start_takes_over_what_earlier_ones_have_packed(file, ends):
    size = 4 * ROWS * COLUMNS
    first = started(file, ends, until=0.4)
    assert first.found == first.kept == 0 and 0 < first.own < size / 2
    second = started(file, ends)
    assert second.found >= first.own and second.kept == first.own and second.own == size - first.own
    third = started(file, ends)
    assert third.kept == size and third.own == 0
    assert third.packed == second.packed == started(file, no_ends()).packed


def test_a_slice_that_a_killed_rank_had_begun_is_packed_again(file, ends):
    first = started(file, ends)
    states = lib.ckdist_loader_states_offset(first.loader.native_open(), 0)
    arena = ffi.buffer(ffi.cast("char *", first.loader.arena), first.loader.planned_bytes)
    arena[states + 4 + 7] = b"\x01"  # claimed
    begin = 7 * first.handle.bytes // 32
    arena[begin : begin + 64] = b"\xff" * 64
    second = started(file, ends)
    assert second.own == first.own // 32 and second.packed == first.packed


def touch(file):
    os.utime(file)


def change_in_place(file):
    status = file.stat()
    with file.open("r+b") as changed:
        changed.write(b"\0" * 4)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, change_in_place])
def test_another_file_is_packed_again(file, ends, change, caplog):
    started(file, ends)
    change(file)
    second = started(file, ends)
    assert second.found == second.kept == 0 and second.own == 4 * ROWS * COLUMNS
    assert [record.getMessage().count("are packed again") for record in caplog.records] == [1]
    assert started(file, ends).kept  # the new ones are kept


@pytest.mark.parametrize("other", [{"rows": (0, ROWS - 16)}, {"quantize": "q8_0"}])
def test_another_division_or_type_is_packed_again(file, ends, other):
    started(file, ends)
    assert started(file, ends, **other).kept == 0


@pytest.mark.parametrize("message", [b"\xc1", b"\x93\xa1x\x01", b"x" * 4096])
def test_an_invalid_header_is_refused_with_a_line(file, ends, message, caplog):
    with open(os.devnull) as null:
        socket.send_fds(ends[1], [message], [null.fileno()])
    assert started(file, ends).found == 0
    assert "weights are packed again" in caplog.text
    assert started(file, ends).kept


def test_a_file_that_could_not_be_read_is_not_trusted(file, ends):
    """Its pages read as zeros: what a rank then packs is not kept."""
    loader = ShardLoader(checkpoint_of(file.parent, TensorSource(WEIGHT, 0, (ROWS, COLUMNS), file, 0)), 1)
    loader.kept = KeptWeights(*(end.dup() for end in ends))
    loader.add_matrix(WEIGHT, [(0, ROWS)])
    loader.kept.find(loader)
    loader.open()
    os.truncate(file, 4096)
    with pytest.raises(ModelFileError, match=str(file)):
        loader.load(progress=False)
    os.truncate(file, 4 * ROWS * COLUMNS)
    again = ShardLoader(loader.checkpoint, 1)
    again.add_matrix(WEIGHT, [(0, ROWS)])
    again.kept = loader.kept  # as if the new file had the old one's times
    again.kept.path = f"/proc/{os.getpid()}/fd/{again.kept._receive()[1]}"
    again.open()
    assert lib.ckdist_loader_kept_bytes(again.native_open()) == 0
