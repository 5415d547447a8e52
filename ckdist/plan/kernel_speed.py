"""Measures the kernels: products with each type of weights on several CPUs at once, attention and norms on one CPU.

`ckdist.topology.bandwidth` measures memory.
"""

import math
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from ckdist import native
from ckdist.plan.machine_spec import MANY
from ckdist.program.cache import KV_TYPES
from ckdist.program.step_batch import BLOCK_TOKENS

ROWS, COLS = 256, 2048  # a matrix that stays in a core's caches
LARGE_ROWS = 3072  # rows of the matrix of products of MANY rows, as in prompts
POSITIONS, HEADS, HEAD_DIM, QUERIES = 512, 4, 128, 64  # attention: HEADS share a kv-head; QUERIES are the last tokens
FLOATS = 1 << 15  # elements of a normed row
GATE = native.numbers("ckdist_gate", "ckdist_gate_")["silu"]

Work = Callable[[], Callable[[], object]]  # makes the function that is timed, on the CPU that runs it


def attention(kind: str) -> Work:
    """Attention of the last QUERIES of POSITIONS tokens. HEADS heads share keys and values of type `kind`."""

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
        task = native.struct(
            "ckdist_attention_task",
            cache=shape,
            kv=cache,
            block_stride=stride,
            block_table=table,
            first_position=POSITIONS - QUERIES,
            tokens=QUERIES,
            heads=HEADS,
            scale=HEAD_DIM**-0.5,
            q=q,
            q_token_stride=HEADS * HEAD_DIM,
            q_head_stride=HEAD_DIM,
            out=out,
            out_token_stride=HEADS * HEAD_DIM,
            out_head_stride=HEAD_DIM,
        )
        size = native.call(lib.ckdist_attention_scratch_bytes, None, [shape], QUERIES, HEADS)
        memory = np.zeros(size + 64, np.uint8)
        scratch = memory[-memory.ctypes.data % 64 :]  # aligned to a cache line
        return lambda: lib.ckdist_attend(native.ffi.NULL, task, pointer(scratch, "uint8_t *"))

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


def product_rates(cpus: Sequence[int], number: int, seconds: float, repeats: int) -> tuple[float, float]:
    """`product_rate` for 1 and for MANY rows."""
    large = product_rate(cpus, number, MANY, seconds, LARGE_ROWS, repeats)
    return product_rate(cpus, number, 1, seconds, ROWS, repeats), large


def attention_rate(cpu: int, kind: str, seconds: float) -> float:
    """Operations per second of a CPU in both products of attention, with keys and values of type `kind`."""
    seen = QUERIES * (POSITIONS - QUERIES / 2)
    return 4.0 * seen * HEADS * HEAD_DIM / call_seconds(cpu, attention(kind), seconds)


def elementwise_rate(cpu: int, seconds: float) -> float:
    """Numbers per second of a CPU in norms and gates."""
    return 2.0 * FLOATS / call_seconds(cpu, elementwise, seconds)


def call_seconds(cpu: int, work: Work, seconds: float) -> float:
    """The shortest time of one call on a CPU, over repeats for `seconds` seconds."""
    before, found = os.sched_getaffinity(0), math.inf
    os.sched_setaffinity(0, {cpu})
    try:
        once, end = work(), time.perf_counter() + seconds
        while found == math.inf or time.perf_counter() < end:
            began = time.perf_counter()
            once()
            found = min(found, time.perf_counter() - began)
    finally:
        os.sched_setaffinity(0, before)
    return found


__all__ = ["attention_rate", "call_seconds", "elementwise_rate", "product_rate", "product_rates"]
