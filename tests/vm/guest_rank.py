"""Guest program: one of two ranks, on rxe0 or rxe1, that go through the verbs transport.

`guest_rank.py CASE,CASE` starts both.
"""

import functools
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np

from ckdist import native
from ckdist.comm.transports import verbs
from ckdist.errors import CkdistError, CommError

ADDRESSES = ("10.9.0.1", "10.9.0.2")
SIZES = [0, 1, 7, 64, 4095, 8152, 8153, 65536, (1 << 20) + 3, 8 << 20]
TIMEOUT = 60.0  # an emulated machine on a busy host has needed more than 20


def receive_exactly(end, n):
    data = b""
    while len(data) < n:
        more = end.recv(n - len(data))
        if not more:
            raise SystemExit("the other rank is gone")
        data += more
    return data


def exchange_over(end, rank):
    """What a world's gather does, over one socket."""

    def exchange(data):
        end.sendall(len(data).to_bytes(4, "little") + data)
        other = receive_exactly(end, int.from_bytes(receive_exactly(end, 4), "little"))
        return [data, other] if rank == 0 else [other, data]

    return exchange


class Transport(verbs.VerbsTransport):
    """With the calls that native code makes elsewhere."""

    def register(self, data: np.ndarray) -> None:
        """Registers memory with the device, so that messages in it are not copied."""
        native.check(native.lib.ckdist_verbs_register(self.handle, native.pointer(data), data.nbytes))

    def send(self, peer: int, tag: int, data: np.ndarray) -> None:
        """Sends `data` to `peer` and returns when it may change."""
        self.wait(self.isend(peer, tag, data), peer, "send")

    def recv(self, peer: int, tag: int, data: np.ndarray) -> np.ndarray:
        """Receives a message of exactly `data`'s size from `peer` into `data`, and returns it."""
        self.wait(self.irecv(peer, tag, data), peer, "recv")
        return data

    def abandon(self, reason: str) -> None:
        """Sends to all ranks that this one gives up, and the reason."""
        native.check(native.lib.ckdist_verbs_abandon(self.handle, reason.encode()))

    def close(self) -> None:
        """Closes the connections and the device."""
        native.ffi.release(self.handle)

    def iput(self, peer: int, window: int, offset: int, data: np.ndarray) -> int:
        """Starts to write `data` at byte `offset` of `peer`'s window. Returns a request for `wait`."""
        return self._begin(native.lib.ckdist_verbs_iput, peer, window, offset, native.pointer(data), data.nbytes)

    def iget(self, peer: int, window: int, offset: int, data: np.ndarray) -> int:
        """Starts to read `data` from byte `offset` of `peer`'s window. Returns a request for `wait`."""
        return self._begin(native.lib.ckdist_verbs_iget, peer, window, offset, native.pointer(data), data.nbytes)

    def inotify(self, peer: int, window: int, slot: int) -> int:
        """Starts to increment a slot of `peer`'s window, after all earlier puts. Returns a request for `wait`."""
        return self._begin(native.lib.ckdist_verbs_inotify, peer, window, slot)

    def notified(self, window: int, slot: int) -> int:
        """How often peers have notified a slot of this rank's window."""
        return native.call(native.lib.ckdist_verbs_notified, self.handle, window, slot)

    def expose(self, window: int, data: np.ndarray) -> None:
        """Makes `data` accessible to all ranks as window `window`."""
        native.check(native.lib.ckdist_verbs_expose(self.handle, window, native.pointer(data), data.nbytes))


devices = functools.cache(verbs.devices)  # soft-RoCE has 1024 addresses per device, and the machine is slow


def open_rank(rank, end, timeout=TIMEOUT):
    choice = verbs.choose(devices(), ADDRESSES[rank])
    assert choice.device == f"rxe{rank}" and choice.gid.version == "RoCE v2", choice
    exchange = exchange_over(end, rank)
    transport = Transport(choice, rank, 2, timeout)
    transport.connect(exchange(transport.address()))
    exchange(b"")  # nobody writes before all are connected
    return transport, exchange


def pattern(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def messages(t, rank, peer, exchange):
    """All sizes both ways at once, from arenas and from ordinary memory, received before and after they arrive."""
    arena = np.empty(2 * SIZES[-1], np.uint8)
    t.register(arena)
    for i, size in enumerate(SIZES):
        for registered in (False, True) if size < 8 << 20 else (True,):
            out, into = pattern(size, 10 * i + rank), np.empty(size, np.uint8)
            if registered:
                arena[:size], out, into = out, arena[:size], arena[SIZES[-1] : SIZES[-1] + size]
            if i % 2:
                receiving, sending = t.irecv(peer, i, into), t.isend(peer, i, out)
            else:
                sending = t.isend(peer, i, out)
                time.sleep(0.02)
                receiving = t.irecv(peer, i, into)
            t.wait(receiving, peer, f"receive {size}")
            t.wait(sending, peer, f"send {size}")
            assert (into == pattern(size, 10 * i + peer)).all(), f"{size} bytes differ"
    failed_registrations(t, peer, exchange)


def failed_registrations(t, peer, exchange):
    """The slots of operations whose memory cannot be registered are used again."""
    count, far = 1 << 20, native.ffi.cast("void *", 4096)  # no memory is mapped there
    slots = []
    for tag in (97, 98):
        receiving = t.irecv(peer, tag, np.empty(0, np.uint8))
        slots.append(receiving % 2**32)
        exchange(b"")
        t.send(peer, tag, np.empty(0, np.uint8))
        t.wait(receiving, peer, "receive")
        for call, *arguments in (
            (native.lib.ckdist_verbs_isend, 99, far),
            (native.lib.ckdist_verbs_irecv, 99, far),
            (native.lib.ckdist_verbs_iput, 99, 0, far),
            (native.lib.ckdist_verbs_iget, 99, 0, far),
        ):
            try:
                t._begin(call, peer, *arguments, count)
                raise SystemExit("memory that is not mapped was registered")
            except CkdistError as error:
                assert f"{count} bytes cannot be registered with RDMA device rxe" in str(error), error
    assert slots[0] == slots[1], f"operations that failed are still in use: {slots}"


def order(t, rank, peer, exchange):
    """Thousands of messages of mixed sizes on three tags, taken tag by tag: in order within each, and never a
    receiver that was not ready; long and short ones of one tag keep their order too.
    """
    count, tags = 3000, 3
    refused = not_ready()
    if rank == 0:
        requests = []
        for i in range(count):
            data = np.full(20000 if i % 500 == 7 else i % 300 + 8, i % 251, np.uint8)
            data[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)
            requests.append((t.isend(1, i % tags, data), data))
        for request, _ in requests:
            t.wait(request, 1, "send")
    else:
        time.sleep(0.5)
        for tag in reversed(range(tags)):
            for i in range(tag, count, tags):
                data = t.recv(0, tag, np.empty(20000 if i % 500 == 7 else i % 300 + 8, np.uint8))
                assert int.from_bytes(data[:8].tobytes(), "little") == i and (data[8:] == i % 251).all(), f"message {i}"
    small = np.zeros(8, np.uint8)
    for i in range(300):  # and back and forth
        if rank == i % 2:
            t.send(peer, 9, np.full(8, i % 256, np.uint8))
        else:
            assert (t.recv(peer, 9, small) == i % 256).all()
    exchange(b"")
    assert not_ready() == refused, "a message met a receiver that was not ready"


def not_ready():
    """How often the devices said "receiver not ready", or were told so."""
    return [path.read_text() for path in pathlib.Path("/sys/class/infiniband").glob("rxe?/ports/1/hw_counters/*rnr*")]


def windows(t, rank, peer, exchange):
    """Puts of many sizes, seen as soon as the notification that follows them is counted; gets; a put out of bounds
    is refused.
    """
    memory = np.zeros(2 << 20, np.uint8)
    t.expose(5, memory)
    sizes = SIZES[:-1]
    put = [pattern(size, 77 + i + rank) for i, size in enumerate(sizes)]
    offsets = np.cumsum([0, *sizes[:-1]])
    requests = [t.iput(peer, 5, int(o), data) for o, data in zip(offsets, put, strict=True)]
    requests.append(t.inotify(peer, 5, 3))
    requests += [t.inotify(peer, 5, 2) for _ in range(4)]
    end = time.monotonic() + TIMEOUT
    while t.notified(5, 3) < 1:
        assert time.monotonic() < end, "no notification"
        os.sched_yield()
    for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        assert (memory[offset : offset + size] == pattern(size, 77 + i + peer)).all(), f"put of {size} bytes"
    for request in requests:
        t.wait(request, peer, "put")
    for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        back = np.empty(size, np.uint8)
        t.wait(t.iget(peer, 5, int(offset), back), peer, "get")
        assert (back == put[i]).all(), f"get of {size} bytes"
    t.send(peer, 1, put[0])
    t.recv(peer, 1, np.empty(0, np.uint8))
    while t.notified(5, 2) < 4:
        assert time.monotonic() < end, "four notifications"
    assert t.notified(5, 2) == 4
    exchange(b"")
    try:
        t.wait(t.iput(peer, 5, memory.nbytes - 2, pattern(3, 0)), peer, "put")
        raise SystemExit("a put beyond the window was done")
    except CommError as error:
        assert f"rank {peer}" in str(error) and "exposes 2097152" in str(error), error
    exchange(b"")


def expect_loss(t, peer, limit, *words):
    """Waits for a message that never comes; the error names the peer within `limit` seconds."""
    start = time.monotonic()
    try:
        t.recv(peer, 1, np.empty(8, np.uint8))
        raise SystemExit("a message arrived from nowhere")
    except CommError as error:
        took = time.monotonic() - start
        assert f"rank {peer} " in str(error) and any(w in str(error) for w in words), error
        assert took < limit, f"noticed after {took:.1f} s"
        print(f"rank {t.rank} after {took:.1f} s: {error}", flush=True)


def port_down(t, rank, peer, exchange):
    """The link is taken down while both wait; both end within the timeout."""
    exchange(b"")
    if rank == 0:
        time.sleep(0.3)
        subprocess.run(["ip", "link", "set", "wire1", "down"], check=True)
    expect_loss(t, peer, 8, f"port 1 of RDMA device rxe{rank} went down")
    exchange(b"")
    if rank == 0:
        subprocess.run(["ip", "link", "set", "wire1", "up"], check=True)
        subprocess.run(["tests/vm/route_wires.sh"], check=True)
        time.sleep(0.5)
    exchange(b"")


def killed(t, rank, peer, exchange):
    """Rank 1 dies without a word; rank 0 notices by its probes."""
    exchange(b"")
    if rank == 1:
        os._exit(9)
    expect_loss(t, peer, 8, "does not answer", "disconnected")


def stalled(t, rank, peer, exchange):
    """Rank 1 lives but does not answer: the timeout, and no more."""
    exchange(b"")
    if rank == 1:
        time.sleep(6)
        return
    expect_loss(t, peer, 8, "did not answer within 5 s")


def goodbye(t, rank, peer, exchange):
    """Rank 1 gives up and says why."""
    exchange(b"")
    if rank == 1:
        t.abandon("its disk is full")
        return
    expect_loss(t, peer, 5, "gave up: its disk is full")


def stranger(t, rank, peer, exchange):
    """Rank 1 is guest_peer.py: an independent program that knows nothing but the wire format."""
    t.send(1, 4, t.recv(1, 3, np.empty(100, np.uint8))[::-1].copy())
    assert (t.recv(1, 3, np.empty(300_000, np.uint8)) == pattern_of(300_000, 1)).all(), (
        "a long message from the stranger"
    )
    t.send(1, 4, pattern_of(100_000, 2))
    memory = pattern_of(1 << 16, 3)
    t.expose(1, memory)
    end = time.monotonic() + TIMEOUT
    while t.notified(1, 6) < 2:
        assert time.monotonic() < end, "no notification"
        os.sched_yield()
    assert (memory[1000:51000] == pattern_of(50_000, 4)).all() and (
        memory[51000:] == pattern_of(1 << 16, 3)[51000:]
    ).all(), "a put by the stranger"
    for i in range(200):
        assert (t.recv(1, 5, np.empty(9, np.uint8)) == i).all()
    put = pattern_of(5000, 5)  # stays until the put is complete
    t.wait(t.iput(1, 1, 70, put), 1, "put")
    t.wait(t.inotify(1, 1, 8), 1, "notify")
    back = np.empty(6000, np.uint8)
    t.wait(t.iget(1, 1, 0, back), 1, "get")
    assert (back[70:5070] == put).all() and (back[:70] == 0).all(), "a get from the stranger"
    t.send(1, 4, np.zeros(1, np.uint8))
    expect_loss(t, 1, TIMEOUT, "sent something that is not a frame")


def pattern_of(size, seed):
    """Bytes that the stranger can make without numpy."""
    return ((np.arange(size, dtype=np.int64) * (2 * seed + 1) + seed) % 253).astype(np.uint8)


CASES = {f.__name__: f for f in (messages, order, windows, stranger, stalled, goodbye, port_down, killed)}
SHORT_TIMEOUT = ("port_down", "killed", "stalled", "goodbye")


def rank_main(cases, rank, fd):
    end = socket.socket(fileno=fd)
    for case in cases.split(","):
        start = time.monotonic()
        t, exchange = open_rank(rank, end, 5.0 if case in SHORT_TIMEOUT else TIMEOUT)
        CASES[case](t, rank, 1 - rank, exchange)
        t.close()
        print(f"rank {rank}: {case} in {time.monotonic() - start:.1f} s", flush=True)


def main():
    if len(sys.argv) == 4:
        return rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    cases = sys.argv[1]
    ends = socket.socketpair()
    other = ["/usr/bin/python3", str(pathlib.Path(__file__).parent / "guest_peer.py"), str(ends[1].fileno())]
    commands = [[sys.executable, __file__, cases, str(r), str(ends[r].fileno())] for r in (0, 1)]
    commands[1] = other if cases == "stranger" else commands[1]
    ranks = [subprocess.Popen(command, pass_fds=[end.fileno()]) for command, end in zip(commands, ends, strict=True)]
    for end in ends:
        end.close()
    codes = [rank.wait() for rank in ranks]
    raise SystemExit(codes != ([0, 9] if cases.endswith("killed") else [0, 0]))


if __name__ == "__main__":
    main()
