"""What the steps of ranks must do, as one program that every rank runs: sums bit for bit, batches and messages in
order, logits in place.

Ranks are threads or processes; every rank draws the same sizes from one seed and its own numbers from another.
"""

import functools

import numpy as np

from ckdist import native
from tests.support.steps import Steps

lib, ffi = native.lib, native.ffi
# values larger than what goes whole to every host, messages of several frames
FLOATS, ROWS, VOCAB, INTS = 40_000, 100, 1009, 3000


@functools.lru_cache(64)  # ranks that are threads expect the same
def numbers(rank: int, exchange: int, count: int) -> np.ndarray:
    """float32 (count,): what `rank` brings to an exchange. Read-only."""
    generator = np.random.Generator(np.random.SFC64([rank, exchange]))
    drawn = generator.standard_normal(count, np.float32)
    drawn.flags.writeable = False
    return drawn


def view(address, count: int) -> np.ndarray:
    """float32 (count,) over native memory."""
    return np.frombuffer(ffi.buffer(address, count * 4), np.float32)


def added(parts: list[np.ndarray], hosts) -> np.ndarray:
    """The ranks' parts in the order of native/comm/algorithms/order.h: those of a host, then the hosts' sums."""
    sums: dict = {}
    for part, host in zip(parts, hosts, strict=True):
        sums[host] = sums[host] + part if host in sums else part
    total, *others = sums.values()
    for other in others:
        total = total + other
    return total


def exchange(communicator, rounds: int, seed: int = 1, hosts=None) -> None:
    """Runs `rounds` rounds of batches, sums, messages and a gather; AssertionError on the first wrong bit.

    `hosts`: of the ranks; one by default.
    """
    rank, size = communicator.rank, communicator.size
    hosts = hosts or [0] * size
    sizes = np.random.default_rng(seed)
    first = [VOCAB * r // size for r in range(size + 1)]
    if size > 2:
        first[1] = 0  # rank 0 has no columns
    columns = first[rank + 1] - first[rank]
    steps = Steps(communicator, FLOATS, ROWS, VOCAB, first[rank], columns, INTS)
    handle, summands = steps.handle, ffi.new("const float *[256]")
    stride, exchanges = ffi.new("int64_t *"), 0
    for _ in range(rounds):
        for _ in range(sizes.integers(1, 4)):
            expected = sizes.integers(-(2**31), 2**31, sizes.integers(1, INTS + 1)).astype(np.int32)
            if rank == 0:
                steps.publish(expected)
            else:
                assert steps.receive() == expected.tolist()
        for n in range(sizes.integers(0, 5)):
            slot, exchanges = n % 2, exchanges + 1
            floats = int(np.exp(sizes.uniform(0, np.log(FLOATS))))
            view(lib.ckdist_steps_partial(handle, slot), floats)[:] = numbers(rank, exchanges, floats)
            steps.all_reduce(slot, floats, n, chunks=int(sizes.integers(1, 9)))
            total = None
            for p in range(lib.ckdist_steps_summands(handle, slot, summands)):
                part = view(summands[p], floats)
                total = part.copy() if total is None else total + part
            expected = added([numbers(r, exchanges, floats) for r in range(size)], hosts)
            assert np.array_equal(total.view(np.int32), expected.view(np.int32)), f"sum of {floats}"
        around(steps, rank, size, int(np.exp(sizes.uniform(0, np.log(FLOATS)))))
        rows = int(sizes.integers(0, ROWS + 1))
        exchanges += 1
        own = lib.ckdist_steps_logits(handle, stride)
        whole = np.concatenate(
            [
                numbers(r, exchanges, rows * (first[r + 1] - first[r])).reshape(rows, first[r + 1] - first[r])
                for r in range(size)
                if first[r + 1] > first[r]
            ],
            axis=1,
        )
        for t in range(rows if columns else 0):
            view(own + t * stride[0], columns)[:] = whole[t, first[rank] : first[rank + 1]]
        steps.gather_logits(rows, 9)
        if rank == 0 and rows:
            assert np.array_equal(view(lib.ckdist_steps_gathered(handle), rows * VOCAB).reshape(rows, VOCAB), whole)
    if rank == 0:
        steps.publish(None)
    else:
        assert steps.receive() == []


def around(steps: Steps, rank: int, size: int, floats: int) -> None:
    """A message from rank to rank, as stages of a pipeline send them: the last has it from all before it."""
    if size == 1:
        return
    if rank:
        assert np.array_equal(steps.recv(np.empty(floats, np.float32), rank - 1), numbers(rank - 1, 0, floats))
    if rank + 1 < size:
        steps.send(numbers(rank, 0, floats), rank + 1)
