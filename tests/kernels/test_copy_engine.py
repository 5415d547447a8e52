"""Copy engines: streaming stores, and an Intel DSA queue over a device in software that reads descriptors as the
hardware would.
"""

import ctypes
import mmap
import os
import platform
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.compiled import NATIVE, OURS, compiled

LINE = 64


@pytest.fixture(scope="module")
def engines():
    """The copy engines with the calls of tests/native/copy_engines.cpp."""
    library = compiled(
        "copy_engines",
        [
            OURS / "copy_engines.cpp",
            *sorted((NATIVE / "copy_engines").glob("*.cpp")),
            NATIVE / "core/numa.cpp",
            NATIVE / "core/error.cpp",
        ],
        "-O0",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        *os.environ.get("CKDIST_TEST_CXXFLAGS", "").split(),
        "-shared",
        "-fPIC",
        "-pthread",
    )
    loaded = ctypes.CDLL(str(library))
    loaded.bench_open.restype = ctypes.c_void_p
    for name in ("device_submissions", "device_dropped", "device_moved", "device_page_faults", "engine_submit"):
        getattr(loaded, name).restype = ctypes.c_int64
    for name in (
        "device_broken",
        "engine_name",
        "engine_trouble",
        "engine_error",
        "find_queues",
        "open_queue",
        "open_copy_engine_of",
    ):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def at(array, offset=0):
    return ctypes.c_void_p(array.ctypes.data + offset)


def random_bytes(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class TestStreams:
    @pytest.mark.parametrize("vector_bytes", (16, 32, 64))
    def test_odd_sizes_at_odd_places(self, engines, vector_bytes):
        data = random_bytes(4096, vector_bytes)
        for size in (0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, 3001):
            for to in (0, 1, 31, 63):
                for start in (0, 7, 64):
                    out = np.full(4096 + 128, 0xEE, np.uint8)
                    base = -out.ctypes.data % LINE + to
                    if not engines.stream_copy(vector_bytes, at(out, base), at(data, start), ctypes.c_int64(size)):
                        pytest.skip("not on this CPU")
                    expected = np.full_like(out, 0xEE)
                    expected[base : base + size] = data[start : start + size]
                    np.testing.assert_array_equal(out, expected)

    def test_widest(self, engines):
        if platform.machine() not in ("x86_64", "AMD64"):
            assert engines.widest_stream_bytes() == 0
            return
        flags = Path("/proc/cpuinfo").read_text()
        widest = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
        limit = {"baseline": 16, "avx2": 32, "avx2_vnni": 32}.get(os.environ.get("CKDIST_ISA"), 64)
        assert engines.widest_stream_bytes() == min(widest, limit)


class Copy(ctypes.Structure):
    _fields_ = [("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class Bench:
    """A DSA copy engine over the device in software, and memory to copy in."""

    def __init__(
        self, library, transfer=1 << 20, batch=16, credits=0, block_on_fault=False, believed=0, seconds=10.0, **settings
    ):
        self.library = library
        self.handle = ctypes.c_void_p(
            library.bench_open(
                *map(ctypes.c_int64, (transfer, batch, credits)),
                int(block_on_fault),
                ctypes.c_int64(believed),
                ctypes.c_int64(int(seconds * 1e9)),
            )
        )
        self.set(**settings)
        self.source, self.target, self.expected = (
            random_bytes(1 << 18, 5),
            np.zeros(1 << 18, np.uint8),
            np.zeros(1 << 18, np.uint8),
        )

    def set(self, **settings):
        for name, value in settings.items():
            assert self.library.device_set(self.handle, name.encode(), ctypes.c_int64(value)), name

    def ask(self, name):
        return getattr(self.library, name)(self.handle)

    def submit(self, *copies):
        """Copies of (to, from, bytes) inside the memory; the ticket."""
        for to, start, size in copies:
            self.expected[to : to + size] = self.source[start : start + size]
        array = (Copy * len(copies))(
            *(Copy(self.target.ctypes.data + to, self.source.ctypes.data + start, size) for to, start, size in copies)
        )
        return self.library.engine_submit(self.handle, array, len(copies))

    def done(self, ticket):
        answer = self.library.engine_done(self.handle, ctypes.c_int64(ticket))
        assert answer >= 0, self.library.engine_error().decode()
        return bool(answer)

    def wait(self, ticket, seconds=20.0):
        end = time.monotonic() + seconds
        while not self.done(ticket):
            assert time.monotonic() < end
        return self

    def right(self):
        np.testing.assert_array_equal(self.target, self.expected)
        assert self.ask("device_broken") == b""
        return True

    @property
    def trouble(self):
        return self.ask("engine_trouble").decode()

    def seen(self):
        out, rows = np.zeros(64, np.uint8), []
        while self.library.device_seen(self.handle, ctypes.c_int64(len(rows)), at(out)):
            rows.append(out.tobytes())
        return rows


@pytest.fixture
def bench(engines):
    """Makes benches; every engine ends before its device."""
    made = []

    def make(**options):
        made.append(Bench(engines, **options))
        return made[-1]

    yield make
    for one in made:
        engines.bench_close_engine(one.handle)
        engines.bench_free(one.handle)


def little(number, size=8):
    return number.to_bytes(size, "little")


FEW = ((0, 1000, 5000), (7001, 3, 777), (9000, 20011, 64))


class TestDescriptors:
    """Byte for byte, after chapter 8 of the specification."""

    def test_memory_move(self, bench):
        b = bench()
        b.wait(b.submit((64, 129, 4660)))
        (d,) = b.seen()
        record = int.from_bytes(d[8:16], "little")
        assert record and record % 32 == 0
        head, size_and_rest = bytes.fromhex("00000000 0c000003"), bytes.fromhex("34120000 0000 0000" + 24 * "00")
        assert (
            d
            == head
            + little(record)
            + little(b.source.ctypes.data + 129)
            + little(b.target.ctypes.data + 64)
            + size_and_rest
        )
        assert b.right()

    def test_block_on_fault_where_the_queue_allows_it(self, bench):
        b = bench(block_on_fault=True)
        b.wait(b.submit(*FEW))
        batch, *moves = b.seen()
        assert batch[:8] == bytes.fromhex("00000000 0c000001")  # reserved in a batch
        assert {d[:8] for d in moves} == {bytes.fromhex("00000000 0e000003")}

    def test_batch(self, bench):
        b = bench()
        b.wait(b.submit(*FEW))
        batch, *moves = b.seen()
        record, listed = (int.from_bytes(batch[i : i + 8], "little") for i in (8, 16))
        assert record % 32 == 0 and listed % 64 == 0
        assert batch == bytes.fromhex("00000000 0c000001") + little(record) + little(listed) + bytes(8) + bytes.fromhex(
            "03000000 0000 0000"
        ) + bytes(24)
        assert [int.from_bytes(d[32:36], "little") for d in moves] == [5000, 777, 64]
        assert len({d[8:16] for d in (batch, *moves)}) == 4  # a record each
        assert b.ask("device_submissions") == 1 and b.right()

    def test_no_batch_where_the_queue_takes_none(self, bench):
        b = bench(batch=1)
        b.wait(b.submit(*FEW))
        assert [d[7] for d in b.seen()] == [3, 3, 3] and b.right()


class TestCopies:
    @pytest.mark.parametrize("deferred", (False, True))
    def test_odd_sizes_and_places(self, bench, deferred):
        b = bench(transfer=4096, batch=5, deferred=deferred, backwards=deferred)
        tickets, place = [], 0
        for size in (1, 2, 63, 64, 65, 4095, 4096, 4097, 9000, 20000, 70001):
            tickets.append(b.submit((place + 3, place // 2 + 1, size), (place + size + 70, 11, 65)))
            place += size + 200
        if deferred:
            assert any(tickets) and not any(b.done(t) for t in tickets if t)
            b.library.device_run(b.handle, ctypes.c_int64(-1))
        for ticket in tickets:
            b.wait(ticket)
        assert b.right() and not b.trouble

    def test_nothing_to_copy(self, bench):
        b = bench()
        assert b.submit((0, 0, 0)) == 0 and b.submit() == 0 and b.done(0) and b.done(99) and b.seen() == []

    def test_tickets_end_in_any_order_and_once_is_for_ever(self, bench):
        b = bench(deferred=True, backwards=True)
        first, second = b.submit((0, 0, 100)), b.submit((200, 300, 100))
        b.library.device_run(b.handle, ctypes.c_int64(1))
        assert b.done(second) and not b.done(first)
        b.library.device_run(b.handle, ctypes.c_int64(1))
        for i in range(100):  # both places are given away meanwhile
            b.submit((1000 + i, i, 1))
            b.library.device_run(b.handle, ctypes.c_int64(-1))
        assert b.done(first) and b.done(second) and b.right()

    def test_more_tickets_than_places_are_copied_here(self, bench):
        b = bench(deferred=True)
        tickets = [b.submit((i * 50, i, 50)) for i in range(40)]
        assert all(tickets[:32]) and not any(tickets[32:]) and b.done(0)
        b.library.device_run(b.handle, ctypes.c_int64(-1))
        assert all(b.done(t) for t in tickets) and b.right() and not b.trouble

    def test_a_dedicated_queue_is_never_overrun(self, bench):
        b = bench(credits=4, batch=1, deferred=True)
        tickets = [b.submit((i * 1000, i, 100), (i * 1000 + 500, i, 100), (i * 1000 + 700, i, 100)) for i in range(5)]
        b.library.device_run(b.handle, ctypes.c_int64(2))
        assert not b.done(tickets[0]) and b.ask("device_submissions") == 4  # the rest was copied here
        tickets += [b.submit((20000 + i, i, 1)) for i in range(3)]
        b.library.device_run(b.handle, ctypes.c_int64(-1))
        for ticket in tickets:
            b.wait(ticket)
        assert b.ask("device_dropped") == 0 and b.ask("device_submissions") == 6 and b.right()

    def test_the_end_waits_for_what_is_under_way(self, bench):
        b = bench(deferred=True, seconds=0.05)
        b.submit((0, 0, 1000))
        b.library.bench_close_engine(b.handle)
        assert b.right()

    def test_a_page_on_trial(self, bench):
        assert (
            bench().ask("engine_name") == b"DSA wq0.1 (shared)"
            and bench(credits=2).ask("engine_name") == b"DSA wq0.1 (dedicated)"
        )
        assert bench().ask("engine_works")
        assert (
            not bench(full=-1).ask("engine_works")
            and not bench(errors=1).ask("engine_works")
            and not bench(lost=1, seconds=0.02).ask("engine_works")
        )


class TestFaults:
    @pytest.mark.parametrize("batch", (1, 16))
    @pytest.mark.parametrize("from_end", (0, 1))
    @pytest.mark.parametrize("after", (0, 1, 63, 700))
    def test_a_page_fault_goes_on_behind_what_was_copied(self, bench, batch, from_end, after):
        b = bench(batch=batch, faults=5, fault_after=after, fault_from_end=from_end)
        b.wait(b.submit(*FEW))
        assert b.right() and not b.trouble and b.ask("device_page_faults") == 5
        assert b.ask("device_moved") == sum(size for *_, size in FEW)  # nothing was copied here, nothing twice

    def test_masked_addresses(self, bench):
        b = bench(faults=2, fault_after=10, fault_info=1)
        b.wait(b.submit(*FEW))
        assert b.right() and b.ask("device_moved") == 5841

    def test_pages_that_nobody_has_touched(self, bench):
        b = bench(real_faults=1)
        fresh = mmap.mmap(-1, 1 << 18)
        b.target = np.frombuffer(fresh, np.uint8)
        b.wait(b.submit((100, 0, 200000), (200200, 50, 60000)))
        assert b.right() and b.ask("device_page_faults") == 2 and b.ask("device_moved") == 260000

    def test_a_fault_that_never_ends_is_copied_here(self, bench):
        b = bench(faults=1000, fault_after=0)
        b.wait(b.submit(*FEW))
        assert b.right() and b.ask("device_moved") == 0 and not b.trouble

    def test_a_fault_at_a_foreign_address_is_an_error(self, bench):
        b = bench(faults=3, fault_after=5, fault_address=4096)
        b.wait(b.submit(*FEW))
        assert b.right() and "3 copies" in b.trouble and "0x03" in b.trouble

    @pytest.mark.parametrize("batch", (1, 16))
    @pytest.mark.parametrize("status", (0x04, 0x10, 0x11, 0x16, 0x20, 0x22, 0x3F))
    def test_errors_are_copied_here_and_end_the_device(self, bench, batch, status):
        b = bench(batch=batch, errors=2, error=status)
        b.wait(b.submit(*FEW))
        assert b.right() and not b.trouble
        b.set(errors=1)
        b.wait(b.submit((30000, 7, 7)))
        assert (
            b.right()
            and f"3 copies with errors, the last with status 0x{status:02x}" in b.trouble
            and "streaming stores" in b.trouble
        )
        before = b.ask("device_submissions")
        assert b.submit((40000, 8, 1000)) == 0 and b.ask("device_submissions") == before and b.right()

    def test_wrong_limits_are_errors(self, bench):
        b = bench(transfer=1000, believed=2000)
        b.wait(b.submit((0, 0, 1001), (2000, 0, 900), (4000, 0, 2000), (8000, 0, 1500)))
        assert b.right() and "0x13" in b.trouble

    def test_a_queue_that_is_full_for_a_while(self, bench):
        b = bench(full=50)
        assert b.submit((0, 0, 1000)) and b.ask("device_submissions") == 51 and b.right()

    def test_a_queue_that_stays_full(self, bench):
        b = bench(full=-1)
        for i in range(64):
            assert not b.trouble and b.submit((i * 100, i, 100), (50000 + i, i, 1)) == 0
        assert "took none of 64 descriptors" in b.trouble and b.right()

    @pytest.mark.parametrize("stop", (0, 2))
    def test_a_batch_that_ends_early(self, bench, stop):
        b = bench(batch_stops_at=stop)
        b.wait(b.submit(*FEW))
        assert b.right() and "batch" in b.trouble

    def test_a_record_that_is_left_out(self, bench):
        b = bench(record_left_out=1)
        b.wait(b.submit(*FEW))
        assert b.right() and "left records of a batch out" in b.trouble


class TestEnds:
    @pytest.mark.parametrize("batch", (1, 16))
    def test_a_device_that_vanishes(self, bench, batch):
        b = bench(batch=batch, seconds=0.05, deferred=True)
        early = b.submit(*FEW)
        b.library.device_run(b.handle, ctypes.c_int64(-1))
        b.set(lost=1)
        late = [b.submit((20000, 5, 3000), (30000, 0, 10)), b.submit((40000, 0, 10))]
        began = time.monotonic()
        b.wait(early).wait(late[1]).wait(late[0])
        assert time.monotonic() - began < 5 and b.right() and "did not end a copy within 0.05 s" in b.trouble
        assert b.submit((50000, 0, 100)) == 0 and b.right()

    def test_a_slow_device_that_the_kernel_waits_for(self, bench):
        b = bench(seconds=0.05, deferred=True)
        b.wait(b.submit(*FEW))
        assert b.right() and b.ask("device_moved") == 5841 and b.trouble  # it copied as well, the same bytes

    def test_a_device_that_hangs_is_one_error(self, bench):
        b = bench(seconds=0.05, deferred=True, hangs=1)
        ticket = b.submit(*FEW)
        time.sleep(0.06)
        for _ in range(2):
            assert b.library.engine_done(b.handle, ctypes.c_int64(ticket)) == -1
            said = b.library.engine_error().decode()
            assert (
                said.startswith("DSA wq0.1 (shared) hangs: it did not end a copy within 0.05 s, nor let go")
                and "--repack threads" in said
            )
        b.set(hangs=0, deferred=0)


def tree(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / "sys/bus/dsa/devices" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return os.fsencode(tmp_path)


def device(number, node=0, **more):
    files = {
        "state": "enabled",
        "numa_node": node,
        "pasid_enabled": 1,
        "max_transfer_size": 2147483648,
        "max_batch_size": 1024,
        **more,
    }
    return {f"dsa{number}/{name}": text for name, text in files.items()}


def queue(name, **more):
    files = {
        "type": "user",
        "state": "enabled",
        "mode": "shared",
        "size": 16,
        "max_transfer_size": 2097152,
        "max_batch_size": 32,
        "block_on_fault": 0,
        "ats_disable": 0,
        **more,
    }
    return {f"{name}/{file}": text for file, text in files.items()}


class TestQueues:
    def find(self, engines, root, node=0):
        return engines.find_queues(root, node).decode()

    def test_the_own_node_first(self, engines, tmp_path):
        files = (
            device(0, node=1)
            | device(2, node=-1)
            | device(4, node=0)
            | queue("wq0.0")
            | queue("wq2.3", mode="dedicated", size=8, block_on_fault=1)
            | queue("wq4.1")
        )
        files |= {"iax1/state": "enabled"} | queue("wq1.0")
        root = tree(tmp_path, files)
        lines = self.find(engines, root).splitlines()
        assert [line.split()[0] for line in lines] == ["wq4.1", "wq2.3", "wq0.0"]
        assert lines[1] == f"wq2.3 -1 dedicated {tmp_path}/dev/dsa/wq2.3 2097152 32 8 1"
        assert [line.split()[0] for line in self.find(engines, root, 1).splitlines()] == ["wq0.0", "wq2.3", "wq4.1"]

    def test_limits_of_older_kernels(self, engines, tmp_path):
        files = device(0)
        del files["dsa0/max_batch_size"]
        root = tree(tmp_path, files | {"wq0.0/type": "user", "wq0.0/state": "enabled", "wq0.0/mode": "shared"})
        assert self.find(engines, root) == f"wq0.0 0 shared {tmp_path}/dev/dsa/wq0.0 2147483648 1 0 0\n"

    @pytest.mark.parametrize(
        ("files", "missing"),
        (
            ({}, "no DSA device"),
            ({"iax1/state": "enabled"} | queue("wq1.0"), "no DSA device"),
            (device(0, state="disabled"), "dsa0 is disabled"),
            (device(0), "without a work queue of type user"),
            (device(0) | queue("wq0.0", type="kernel"), "without a work queue of type user"),
            (device(0) | queue("wq0.0", state="disabled"), "wq0.0 is disabled"),
            (device(0, pasid_enabled=0) | queue("wq0.0"), "no shared virtual memory"),
            (device(0) | queue("wq0.0", ats_disable=1), "address translation"),
            (device(0) | queue("wq0.0", mode="odd"), "neither shared nor dedicated"),
            (device(0, max_transfer_size="x") | queue("wq0.0", max_transfer_size="-1"), "no max_transfer_size"),
            (device(0) | queue("wq0.0x") | queue("wq0") | queue("wq-1.0"), "without a work queue of type user"),
        ),
    )
    def test_what_is_missing(self, engines, tmp_path, files, missing):
        said = self.find(engines, tree(tmp_path, files))
        assert said.startswith("!") and missing in said

    def test_devices_that_cannot_be_opened(self, engines, tmp_path):
        root = tree(tmp_path, device(0) | queue("wq0.0"))
        assert (
            engines.open_queue(root).decode() == f"{tmp_path}/dev/dsa/wq0.0 cannot be opened: No such file or directory"
        )
        node = tmp_path / "dev/dsa/wq0.0"
        node.parent.mkdir(parents=True)
        node.write_text("")
        assert engines.open_queue(root).decode() == f"{node} is no character device"
        node.unlink()
        node.symlink_to("/dev/null")  # no portal to map
        said = engines.open_queue(root).decode()
        assert "no ENQCMD" in said or "cannot be mapped" in said

    def test_choices(self, engines):
        reason = ctypes.create_string_buffer(500)
        by_threads = b"streaming" if platform.machine() == "x86_64" else b"plain copies"
        assert by_threads in engines.open_copy_engine_of(2, reason, 500) and not reason.value
        chosen = engines.open_copy_engine_of(0, reason, 500)
        assert (b"DSA" in chosen) == (not reason.value)
        demanded = engines.open_copy_engine_of(1, reason, 500).decode()
        if b"DSA" not in chosen:
            assert demanded.startswith("!no DSA queue can be used: ") and demanded.endswith(
                "--repack threads copies without one"
            )
