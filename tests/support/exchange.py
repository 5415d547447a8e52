"""What a group of ranks must do, as one program that every rank runs: sums bit for bit, messages in order, logits in
place.

Ranks are threads or processes; every rank draws the same sizes from one seed and its own numbers from another.
"""

import numpy as np

from ckdist import native

lib, ffi = native.lib, native.ffi
# values larger than what goes whole to every host, messages of several frames
FLOATS, ROWS, VOCAB, INTS = 40_000, 100, 1009, 3000


def numbers(rank: int, exchange: int, count: int) -> np.ndarray:
    """float32 (count,): what `rank` brings to an exchange."""
    generator = np.random.Generator(np.random.SFC64([rank, exchange]))
    return generator.standard_normal(count, np.float32)


def view(address, count: int) -> np.ndarray:
    """float32 (count,) over native memory."""
    return np.frombuffer(ffi.buffer(address, count * 4), np.float32)


def added(parts: list[np.ndarray], hosts) -> np.ndarray:
    """The ranks' parts in the order of native/comm/order.h: those of a host, then the hosts' sums."""
    sums: dict = {}
    for part, host in zip(parts, hosts, strict=True):
        sums[host] = sums[host] + part if host in sums else part
    total, *others = sums.values()
    for other in others:
        total = total + other
    return total


def exchange(handle, rank: int, size: int, rounds: int, seed: int = 1, hosts=None) -> None:
    """Runs `rounds` rounds of messages, reduces and a gather; AssertionError on the first wrong bit.

    `hosts`: of the ranks; one by default.
    """
    hosts = hosts or [0] * size
    sizes = np.random.default_rng(seed)
    first = [VOCAB * r // size for r in range(size + 1)]
    if size > 2:
        first[1] = 0  # rank 0 has no columns
    columns = first[rank + 1] - first[rank]
    native.check(lib.ckdist_group_reserve(handle, FLOATS, ROWS, VOCAB, first[rank], columns, INTS))
    parts, message, ints = ffi.new("const float *[256]"), ffi.new("const int32_t **"), ffi.new("int64_t *")
    stride, exchanges = ffi.new("int64_t *"), 0
    for _ in range(rounds):
        for _ in range(sizes.integers(1, 4)):
            expected = sizes.integers(-(2**31), 2**31, sizes.integers(1, INTS + 1)).astype(np.int32)
            if rank == 0:
                native.check(lib.ckdist_group_publish(handle, native.pointer(expected, "int32_t *"), len(expected)))
            else:
                native.check(lib.ckdist_group_receive(handle, message, ints))
                assert np.array_equal(np.frombuffer(ffi.buffer(message[0], ints[0] * 4), np.int32), expected)
        for n in range(sizes.integers(0, 5)):
            slot, exchanges = n % 2, exchanges + 1
            floats = int(np.exp(sizes.uniform(0, np.log(FLOATS))))
            view(lib.ckdist_group_partial(handle, slot), floats)[:] = numbers(rank, exchanges, floats)
            native.check(lib.ckdist_group_reduce(handle, slot, floats, n))
            total = None
            for p in range(lib.ckdist_group_parts(handle, slot, parts)):
                part = view(parts[p], floats)
                total = part.copy() if total is None else total + part
            expected = added([numbers(r, exchanges, floats) for r in range(size)], hosts)
            assert np.array_equal(total.view(np.int32), expected.view(np.int32)), f"sum of {floats}"
        rows = int(sizes.integers(0, ROWS + 1))
        exchanges += 1
        own = lib.ckdist_group_logits(handle, stride)
        whole = np.concatenate(
            [
                numbers(r, exchanges, rows * (first[r + 1] - first[r])).reshape(rows, -1)
                for r in range(size)
                if first[r + 1] > first[r]
            ],
            axis=1,
        )
        for t in range(rows if columns else 0):
            view(own + t * stride[0], columns)[:] = whole[t, first[rank] : first[rank + 1]]
        native.check(lib.ckdist_group_gather(handle, rows, 9))
        if rank == 0 and rows:
            assert np.array_equal(view(lib.ckdist_group_gathered(handle), rows * VOCAB).reshape(rows, VOCAB), whole)
    if rank == 0:
        native.check(lib.ckdist_group_publish(handle, ffi.NULL, 0))
    else:
        native.check(lib.ckdist_group_receive(handle, message, ints))
        assert ints[0] == 0
