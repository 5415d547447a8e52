"""Every operation of a communicator, on one rank of any world, checked bit by bit against numpy; prints a digest of all
results.

Under mpirun, or with RANK and so on: python tests/support/programs/collectives.py TRANSPORTS share|alone LARGEST, one
transport after the other, with or without memory shared inside a host, up to LARGEST elements; LARGEST `large`: 20 MiB
at once and nothing else.
"""

import functools
import hashlib
import sys

import numpy as np

from ckdist.comm.bootstrap.tcp_world import TcpWorld, is_started
from ckdist.comm.communicator import open_communicator
from ckdist.comm.mpi_world import MpiWorld

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
SIZES = (0, 1, 7, 64, 1023, 4099, 40_000, 300_001)
AT_ONCE = 40_000  # elements at most of operations that overlap


def widen(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32) if dtype == "float16" else x


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return x.astype(np.float16) if dtype == "float16" else x


@functools.lru_cache(64)  # ranks that are threads expect the same
def values(rank: int, size: int, dtype: str) -> np.ndarray:
    """The arrays of a rank for an operation. They are read-only: no operation may change its input."""
    rng = np.random.default_rng([rank, size, DTYPES.index(dtype)])
    if dtype in ("int32", "int8"):
        limits = np.iinfo(dtype)
        drawn = rng.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)
    else:
        drawn = narrow((rng.standard_normal(size) * 8).astype(np.float32), dtype)
    drawn.flags.writeable = False
    return drawn


def fold(parts: list, op: str) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op](total, part)
    return total


@functools.lru_cache(8)
def expected(hosts: tuple, size: int, dtype: str, op: str) -> np.ndarray:
    """Within a host in rank order, then hosts in the order of their first ranks, in float32."""
    with np.errstate(over="ignore"):
        of_host = [
            fold([widen(values(r, size, dtype), dtype) for r, h in enumerate(hosts) if h == host], op)
            for host in dict.fromkeys(hosts)
        ]
        return narrow(fold(of_host, op), dtype)


def same(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), (
        f"{what}: {got.ravel()[:4]} instead of {wanted.ravel()[:4]}"
    )


def reductions(c, hosts, largest: int, digest) -> None:
    for dtype in DTYPES:
        for size in (n for n in SIZES if n <= largest):
            x = values(c.rank, size, dtype)
            for op in ("sum", "max", "min") if size == 1023 else ("sum",):
                wanted = expected(hosts, size, dtype, op)
                what = f"{op} of {size} {dtype} over {hosts}"
                same(c.all_reduce(x, op, dtype=dtype), wanted, what)
                placed = c.allocate(size, dtype)
                placed[:] = x
                same(c.all_reduce(placed, op, out=placed, dtype=dtype), wanted, what + " in place")
                cuts = np.linspace(0, size, c.size + 1).astype(int)
                cuts[1] = cuts[0]  # one part of nothing
                counts = np.diff(cuts).tolist()
                same(
                    c.reduce_scatter(x, counts, op, dtype=dtype),
                    wanted[cuts[c.rank] : cuts[c.rank + 1]],
                    what + " scattered",
                )
                digest.update(wanted.tobytes())


def movements(c, hosts, largest: int, digest) -> None:
    for size in (n for n in SIZES if n <= largest):
        everyone = [values(r, size, "float32") for r in range(c.size)]
        x = everyone[c.rank]
        same(c.all_gather(x), np.concatenate(everyone), "all_gather")
        counts = [(size // (r + 1)) * (r != 1) for r in range(c.size)]
        same(
            c.all_gather(x[: counts[c.rank]].copy(), counts),
            np.concatenate([e[:n] for e, n in zip(everyone, counts, strict=True)]),
            "uneven all_gather",
        )
        same(c.broadcast(x.copy(), root=c.size - 1), everyone[-1], "broadcast")
        whole, wanted = c.allocate(size * c.size), np.concatenate(everyone)
        own = slice(c.rank * size, (c.rank + 1) * size)
        whole[own] = x
        for out, what in (
            (whole.copy() if c.rank == 1 else whole, "where one rank's peers cannot write"),
            (whole, "where peers write"),
        ):
            same(c.all_gather(x, out=out), wanted, "all_gather to " + what)
            out[: own.start], out[own.stop :] = 0, 0
            same(c.all_gather(out[own], out=out), wanted, "all_gather in place, to " + what)
        # Rank r sends rank q (r + 2 q) % 5 times a fifth of `size` elements.
        share = lambda r, q: (r + 2 * q) % 5 * size // 5
        send, receive = [share(c.rank, q) for q in range(c.size)], [share(q, c.rank) for q in range(c.size)]
        pattern = lambda r, q: (np.arange(share(r, q)) + 1000 * r + q).astype(np.int32)
        given, wanted = (
            np.concatenate([pattern(c.rank, q) for q in range(c.size)]),
            np.concatenate([pattern(q, c.rank) for q in range(c.size)]),
        )
        got = c.all_to_all(given, send, receive)
        same(got, wanted, "all_to_all")
        placed = c.allocate(wanted.size, "int32")
        same(c.all_to_all(given, send, receive, out=placed), wanted, "all_to_all to where peers write")
        same(
            c.all_to_all(given, send, receive, out=placed if c.rank else None),
            wanted,
            "all_to_all to where one rank's peers cannot write",
        )
        digest.update(got.tobytes())
        after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
        back = np.empty(size, np.float32)
        arriving = c.irecv(back, before, tag=3)
        c.send(x, after, tag=3)
        same(arriving.wait(), everyone[before], "message")
        placed = c.allocate(size)
        placed[:] = x
        leaving = c.isend(placed, after)
        same(c.recv(back, before), everyone[before], "message from where peers read it")
        leaving.wait()


def overlapping(c, hosts, largest: int, digest) -> None:
    """Several collectives, messages and a blocking collective under way at once."""
    sizes = [n for n in SIZES if n <= AT_ONCE]
    sums = [c.start.all_reduce(values(c.rank, n, "float32")) for n in sizes]
    after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    inbox = [np.empty(n, np.int32) for n in sizes]
    arriving = [c.irecv(a, before, tag) for tag, a in enumerate(inbox)]
    leaving = [c.isend(values(c.rank, n, "int32"), after, tag) for tag, n in reversed(list(enumerate(sizes)))]
    same(
        c.all_reduce(values(c.rank, 64, "bfloat16"), dtype="bfloat16"),
        expected(hosts, 64, "bfloat16", "sum"),
        "blocking among others",
    )
    for n, operation in zip(sizes, sums, strict=True):
        same(operation.wait(), expected(hosts, n, "float32", "sum"), "overlapping all_reduce")
    for n, operation in zip(sizes, arriving, strict=True):
        same(operation.wait(), values(before, n, "int32"), "overlapping message")
    for operation in leaving:
        while not operation.test():
            pass


def windows(c, hosts, largest: int, digest) -> None:
    for room in (np.zeros(64 * c.size, np.int32), c.allocate(64 * c.size, "int32")):
        one_sided(c, room)


def one_sided(c, room) -> None:
    window = c.window(room)
    for peer in range(c.size):
        if peer != c.rank:
            window.put(np.full(64, 100 + c.rank, np.int32), peer, offset=256 * c.rank).wait()
            window.notify(peer, slot=2).wait()
    window.wait(c.size - 1, slot=2)
    wanted = np.repeat(100 + np.arange(c.size, dtype=np.int32), 64)
    wanted[64 * c.rank : 64 * c.rank + 64] = 0
    same(room, wanted, "puts")
    c.barrier()
    peer = (c.rank + 1) % c.size
    got = window.get(np.empty(64 * c.size, np.int32), peer)
    peer_has = np.repeat(100 + np.arange(c.size, dtype=np.int32), 64)
    peer_has[64 * peer : 64 * peer + 64] = 0
    same(got.wait(), peer_has, "get")
    c.barrier()


def splits(c, hosts, largest: int, digest) -> None:
    half = c.split(c.rank % 2, key=c.size - 1 - c.rank)
    members = sorted((r for r in range(c.size) if r % 2 == c.rank % 2), reverse=True)
    assert half.size == len(members) and members[half.rank] == c.rank
    own = [hosts[r] for r in members]
    x = narrow(np.full(5000, members.index(c.rank) + 0.25, np.float32), "float32")
    wanted = fold(
        [
            fold([np.full(5000, i + 0.25, np.float32) for i, h in enumerate(own) if h == host], "sum")
            for host in dict.fromkeys(own)
        ],
        "sum",
    )
    same(half.all_reduce(x), wanted, "sum in a half")
    same(c.all_reduce(values(c.rank, 64, "float32")), expected(hosts, 64, "float32", "sum"), "sum beside a half")
    quarter = half.split(0 if half.rank == 0 else -1)
    assert (quarter is None) == (half.rank != 0)
    half.barrier()


LARGE_BYTES, PERIOD = 33 << 20, 40_001  # a reduction has segments of 16 MiB at most: two whole ones and a part


def repeat(period: np.ndarray, out: np.ndarray) -> np.ndarray:
    for begin in range(0, out.size, PERIOD):
        out[begin : begin + PERIOD] = period[: out.size - begin]
    return out


def same_repeated(got: np.ndarray, period: np.ndarray, what: str) -> None:
    """Period by period, so that nothing large is made to compare with."""
    for begin in range(0, got.size, PERIOD):
        same(got[begin : begin + PERIOD], period[: got.size - begin], what)


def large(c, hosts, largest: int, digest) -> None:
    """`largest` bytes of numbers that repeat, so that what is expected is quickly known."""
    for dtype in ("float32", "bfloat16", "int8"):  # elements of 4, 2 and 1 byte
        own, wanted = values(c.rank, PERIOD, dtype), expected(hosts, PERIOD, dtype, "sum")
        x = c.allocate(largest // own.itemsize, dtype)
        for array in (x, np.empty_like(x)) if dtype == "float32" else (x,):
            same_repeated(
                c.all_reduce(repeat(own, array), out=array, dtype=dtype), wanted, f"{largest} bytes of {dtype}"
            )
        digest.update(wanted)
        del x, array
    after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    size = largest // 4
    everyone = [values(r, PERIOD, "float32") for r in range(c.size)]
    x = repeat(everyone[c.rank], c.allocate(size))
    back = np.empty_like(x)
    arriving = c.irecv(back, before)
    c.send(x, after)
    same_repeated(arriving.wait(), everyone[before], "a large message")
    counts = [(size // c.size) * (r != 1) for r in range(c.size)]
    gathered = c.all_gather(x[: counts[c.rank]], counts)
    assert gathered.size == sum(counts)
    for own, end, count in zip(everyone, np.cumsum(counts), counts, strict=True):
        same_repeated(gathered[end - count : end], own, "all_gather of large parts")
    same_repeated(c.broadcast(x, root=1), everyone[1], "broadcast of a large array")


BATTERY = (reductions, movements, overlapping, windows, splits)


def battery(world, largest: int = SIZES[-1], parts=BATTERY, timeout: float = 30, **options) -> str:
    """Runs the checks on this rank; the digest is the same on all transports for the same hosts."""
    c = open_communicator(world, timeout=timeout, arena_bytes=1 << 28, **options)
    digest = hashlib.sha256(str(c.rank).encode())
    for part in parts:
        part(c, world.hosts, largest, digest)
        c.barrier()
    c.close()
    return digest.hexdigest()


if __name__ == "__main__":
    world = TcpWorld.from_environment() if is_started() else MpiWorld()
    size, parts = (20 << 20, (large,)) if sys.argv[3] == "large" else (int(sys.argv[3]), BATTERY)
    for transport in sys.argv[1].split(","):
        # One write: lines of several ranks may not mix.
        sys.stdout.write(
            f"{world.rank} {battery(world, size, parts, transport=transport, share=sys.argv[2] == 'share')}\n"
        )
        sys.stdout.flush()
    world.close()
