"""How fast each NUMA node reads memory and multiplies matrices: a process of its own, which prints one JSON line per
measurement.

It is started by `ckdist doctor`, which takes what was measured in time and ends it: python -m ckdist.cli.node_speed
SECONDS.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckdist import native
from ckdist.errors import CkdistError
from ckdist.topology import Machine, this_machine
from ckdist.topology.bandwidth import REPEATS, read_bandwidth, read_size
from ckdist.topology.placement import threads_first

GEMM_TYPES = {"BF16": 30, "F32": 0, "Q8_0": 8}
GEMM_ROWS, GEMM_COLS, GEMM_TOKENS = 512, 2048, 256
GEMM_SECONDS = 0.3


def node_cpus(machine: Machine) -> dict[int, list[int]]:
    """Each node with CPUs that this process may use -> one of every physical core."""
    result = {}
    for node in machine.nodes:
        mine = tuple(cpu for cpu in node.cpus if cpu in machine.binding.cpus)
        if mine:
            result[node.number] = threads_first(machine, mine)[: len(machine.cores(mine))]
    return result


def read_node(machine: Machine, cpus: list[int], memory: int) -> float:
    """Bytes per second that `cpus` read together from the memory of a node.

    CapacityError where it has no room for the test.
    """
    size = read_size(machine, cpus)
    nodes = [memory] if len(machine.nodes) > 1 else []
    native.check(native.lib.ckdist_place_memory(nodes, len(nodes), 1))
    return read_bandwidth(len(cpus), cpus, REPEATS, size // len(cpus))


def operands(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of packed tiles of (GEMM_ROWS, GEMM_COLS) weights of a ggml type, and of (GEMM_TOKENS, GEMM_COLS) inputs in
    the format that they are multiplied with.
    """
    lib, check, pointer = native.lib, native.check, native.pointer
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((GEMM_ROWS, GEMM_COLS), np.float32)  # (rows, cols)
    packed = np.zeros(
        GEMM_ROWS * GEMM_COLS // lib.ckdist_type_block_elements(number) * lib.ckdist_type_block_bytes(number), np.uint8
    )
    if number:
        check(
            lib.ckdist_quantize(
                native.ffi.NULL,
                number,
                GEMM_ROWS,
                GEMM_COLS,
                pointer(weights, "float *"),
                pointer(packed, "uint8_t *"),
                packed.size,
            )
        )
    else:
        packed = weights.reshape(-1).view(np.uint8)
    tiles = np.zeros(lib.ckdist_tile_bytes(native.ffi.NULL, number, GEMM_COLS) * (GEMM_ROWS // 16), np.uint8)
    check(
        lib.ckdist_pack(
            native.ffi.NULL,
            number,
            GEMM_ROWS,
            GEMM_COLS,
            pointer(packed, "uint8_t *"),
            packed.size,
            pointer(tiles, "uint8_t *"),
            tiles.size,
        )
    )
    form = lib.ckdist_activation_format(native.ffi.NULL, number)
    inputs = rng.standard_normal((GEMM_TOKENS, GEMM_COLS), np.float32)  # (tokens, cols)
    x = np.zeros(GEMM_TOKENS * lib.ckdist_activation_bytes(form, GEMM_COLS), np.uint8)
    check(
        lib.ckdist_prepare(
            native.ffi.NULL,
            form,
            pointer(inputs, "float *"),
            GEMM_TOKENS,
            GEMM_COLS,
            0,
            GEMM_COLS,
            pointer(x, "uint8_t *"),
            x.size,
        )
    )
    return tiles, x


def multiply_on(cpus: list[int], kind: str, seconds: float) -> float:
    """Operations per second of (GEMM_TOKENS, GEMM_COLS) x (GEMM_COLS, GEMM_ROWS) on every one of `cpus` at once,
    each with its own operands.
    """
    lib, pointer, number = native.lib, native.pointer, GEMM_TYPES[kind]
    tiles, x = operands(number)
    start = threading.Barrier(len(cpus))
    rates = [0.0] * len(cpus)

    def work(index: int) -> None:
        """One thread: multiplies on its CPU from the moment on when all are ready."""
        os.sched_setaffinity(0, {cpus[index]})
        own_tiles, own_x = tiles.copy(), x.copy()  # touched here first
        y = np.zeros((GEMM_TOKENS, GEMM_ROWS), np.float32)  # (tokens, rows)
        once = lambda: lib.ckdist_multiply(
            native.ffi.NULL, number, GEMM_ROWS, GEMM_COLS, pointer(own_tiles, "uint8_t *"), tiles.size,
            0, GEMM_ROWS // 16, pointer(own_x, "uint8_t *"), x.size, GEMM_TOKENS, pointer(y, "float *"),
        )  # fmt: skip
        once()
        start.wait()
        began, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - began < seconds:
            once()
            calls += 1
        rates[index] = 2.0 * GEMM_ROWS * GEMM_COLS * GEMM_TOKENS * calls / (time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(cpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def measurements(machine: Machine, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields what there is to measure, most wanted first: local reads, products, then reads across nodes, as time
    allows.
    """
    until = time.monotonic() + seconds
    by_node = node_cpus(machine)
    each = min(GEMM_SECONDS, seconds / 2 / (len(GEMM_TYPES) * max(1, len(by_node))))
    readable = [node.number for node in machine.nodes if node.memory or len(machine.nodes) == 1]
    local = [(node, node) for node in by_node if node in readable]
    remote = [(cpus, memory) for cpus in by_node for memory in readable if cpus != memory]

    def read(pair: tuple[int, Any]) -> dict[str, Any]:
        """By the CPUs of one node, of the memory of another or the same."""
        return {
            "what": "read",
            "node": pair[0],
            "memory": pair[1],
            "rate": read_node(machine, by_node[pair[0]], pair[1]),
        }

    def multiply(pair: tuple[int, Any]) -> dict[str, Any]:
        """On the CPUs of a node, in one of GEMM_TYPES."""
        return {"what": "gemm", "node": pair[0], "type": pair[1], "rate": multiply_on(by_node[pair[0]], pair[1], each)}

    jobs: list[tuple[Callable[[tuple[int, Any]], dict[str, Any]], tuple[int, Any]]] = (
        [(read, pair) for pair in local]
        + [(multiply, (node, kind)) for node in by_node for kind in GEMM_TYPES]
        + [(read, pair) for pair in remote]
    )
    for job, pair in jobs:
        if time.monotonic() > until:
            return
        try:
            yield job(pair)
        except (CkdistError, OSError) as error:
            yield {"what": "failed", "node": pair[0], "why": str(error)}


if __name__ == "__main__":
    for row in measurements(this_machine(), float(sys.argv[1])):
        print(json.dumps(row), flush=True)
