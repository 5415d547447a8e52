"""Measures the kernels as steps run them: on all CPUs at once, for long enough that clocks have fallen.

A kernel alone is up to 1.7 times faster than on all cores. Rates are medians, because the best of many short runs is a
speed that no step keeps. `ckdist.topology.bandwidth` measures memory.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ckdist import native
from ckdist.program.cache import KV_TYPES
from ckdist.program.step_batch import BLOCK_TOKENS

ROWS, COLS = 256, 2048  # a matrix that stays in a core's caches
POSITIONS, QUERIES, HEADS, HEAD_DIM = 1024, 32, 4, 128  # attention: QUERIES tokens at a time, HEADS share a kv-head
PYTHON_CPUS = 32  # CPUs that call kernels from Python at once: more would wait for its lock
FLOATS = 1 << 18  # elements of a core's part of a prompt's hidden states
GATE = native.numbers("ckdist_gate", "ckdist_gate_")["silu"]

Work = Callable[[], Callable[[], object]]  # makes the function that is timed, on the CPU that runs it


def attention(kind: str) -> Work:
    """Attention of a prompt of POSITIONS tokens. HEADS heads share keys and values of type `kind`."""

    def make() -> Callable[[], object]:
        """Makes a task over a cache of its own."""
        lib, pointer = native.lib, native.pointer
        rng, number = np.random.default_rng(0), KV_TYPES[kind]
        shape = [number, number, HEAD_DIM, HEAD_DIM, False]
        stride = native.call(lib.ckdist_attention_block_bytes, None, [shape])
        cache = np.zeros(POSITIONS // BLOCK_TOKENS * stride, np.uint8)
        k, v = (rng.standard_normal((POSITIONS, HEAD_DIM), np.float32) for _ in range(2))  # (positions, head_dim)
        for p in range(POSITIONS):
            block = cache[p // BLOCK_TOKENS * stride :]
            native.call(lib.ckdist_attention_store, None, [shape], block, p % BLOCK_TOKENS, k[p], v[p])
        q = rng.standard_normal((QUERIES, HEADS, HEAD_DIM), np.float32)  # (tokens, heads, head_dim)
        out, table = np.zeros_like(q), np.arange(POSITIONS // BLOCK_TOKENS, dtype=np.int32)
        common = {"cache": shape, "kv": cache, "block_stride": stride, "block_table": table}
        common |= {"heads": HEADS, "scale": HEAD_DIM**-0.5, "q": q, "out": out, "tokens": QUERIES}
        common |= {"q_token_stride": HEADS * HEAD_DIM, "q_head_stride": HEAD_DIM}
        common |= {"out_token_stride": HEADS * HEAD_DIM, "out_head_stride": HEAD_DIM}
        tasks = [
            native.struct("ckdist_attention_task", first_position=first, **common)
            for first in range(0, POSITIONS, QUERIES)
        ]
        size = native.call(lib.ckdist_attention_scratch_bytes, None, [shape], QUERIES, HEADS)
        memory = np.zeros(size + 64, np.uint8)
        scratch = memory[-memory.ctypes.data % 64 :]  # aligned to a cache line
        return lambda: [lib.ckdist_attend(native.ffi.NULL, task, pointer(scratch, "uint8_t *")) for task in tasks]

    return make


def elementwise() -> Callable[[], object]:
    """A norm and a gate of FLOATS numbers each."""
    x, y = np.ones(FLOATS, np.float32), np.ones(FLOATS, np.float32)  # (floats,)
    first, second = (native.pointer(a, "float *") for a in (x, y))

    def run() -> object:
        """Runs both."""
        native.lib.ckdist_rms_norm(native.ffi.NULL, first, first, 1e-6, x.size, second)
        return native.lib.ckdist_gated(native.ffi.NULL, GATE, first, first, y.size, second)

    return run


def product_rate(
    cpus: Sequence[int], number: int, tokens: int, seconds: float, rows: int = ROWS, repeats: int = 5
) -> float:
    """Operations per second per CPU, all `cpus` at work, in products of (tokens, COLS) with weights (rows, COLS).

    `number` is the ggml type of the weights. Raises NativeError for an unknown type.
    """
    numbers = [number, len(cpus), cpus, rows, COLS, tokens, seconds, repeats]
    return native.call(native.lib.ckdist_product_rate, None, *numbers) / len(cpus)


def attention_rate(cpus: Sequence[int], kind: str, seconds: float) -> float:
    """Operations per second of a CPU in both products of attention, with keys and values of type `kind`."""
    seen = POSITIONS * POSITIONS / 2
    return 4.0 * seen * HEADS * HEAD_DIM / call_seconds(cpus, attention(kind), seconds)


def elementwise_rate(cpus: Sequence[int], seconds: float) -> float:
    """Numbers per second of a CPU in norms and gates."""
    return 2.0 * FLOATS / call_seconds(cpus, elementwise, seconds)


def call_seconds(cpus: Sequence[int], work: Work, seconds: float) -> float:
    """The median time of a call, all `cpus` at work for `seconds` seconds, each on its own data."""
    cpus = cpus[:PYTHON_CPUS]
    ready = threading.Barrier(len(cpus))

    def calls(cpu: int) -> list[float]:
        """Times of the calls on one CPU."""
        os.sched_setaffinity(0, {cpu})
        once, found = work(), list[float]()
        ready.wait()
        end = time.perf_counter() + seconds
        while not found or time.perf_counter() < end:
            began = time.perf_counter()
            once()
            found.append(time.perf_counter() - began)
        return found

    with ThreadPoolExecutor(len(cpus)) as pool:
        return statistics.median(took for found in pool.map(calls, cpus) for took in found)
