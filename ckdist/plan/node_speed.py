"""Measures how fast each NUMA node reads memory and multiplies matrices. Prints one JSON line per measurement.

`ckdist doctor` runs this module as a process, python -m ckdist.plan.node_speed SECONDS, and kills it after a limit.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ckdist.errors import CkdistError
from ckdist.plan.kernel_speed import product_rate
from ckdist.topology import Machine, this_machine
from ckdist.topology.bandwidth import REPEATS, node_cpus, read_node

GEMM_TYPES = {"BF16": 30, "F32": 0, "Q8_0": 8}
GEMM_TOKENS = 256
GEMM_SECONDS = 0.3
GEMM_UNTIL = 2 / 3  # share of the time: no product begins later, which leaves time for reads across nodes


def multiply_on(cpus: list[int], kind: str, seconds: float) -> float:
    """Returns the operations/s of products of GEMM_TOKENS rows on all `cpus` at once.

    Each CPU multiplies matrices of its own, in one pass of about `seconds`.
    """
    return len(cpus) * product_rate(cpus, GEMM_TYPES[kind], GEMM_TOKENS, seconds, repeats=1)


def measurements(machine: Machine, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the measurements, most important first.

    Local reads come first, then products in two thirds of the time, then reads across nodes as time allows.
    """
    began = time.monotonic()
    by_node = node_cpus(machine)
    each = min(GEMM_SECONDS, seconds / 2 / (len(GEMM_TYPES) * max(1, len(by_node))))
    readable = [node.number for node in machine.nodes if node.memory or len(machine.nodes) == 1]
    local = [(node, node) for node in by_node if node in readable]
    remote = [(cpus, memory) for cpus in by_node for memory in readable if cpus != memory]

    def read(pair: tuple[int, Any]) -> dict[str, Any]:
        """Reads memory of node `pair[1]` on the CPUs of node `pair[0]`."""
        return {
            "what": "read",
            "node": pair[0],
            "memory": pair[1],
            "rate": read_node(machine, by_node[pair[0]], pair[1], REPEATS),
        }

    def multiply(pair: tuple[int, Any]) -> dict[str, Any]:
        """Multiplies on the CPUs of node `pair[0]` in the type `pair[1]`."""
        return {"what": "gemm", "node": pair[0], "type": pair[1], "rate": multiply_on(by_node[pair[0]], pair[1], each)}

    jobs: list[tuple[Callable[[tuple[int, Any]], dict[str, Any]], tuple[int, Any], float]] = (
        [(read, pair, seconds) for pair in local]
        + [(multiply, (node, kind), GEMM_UNTIL * seconds) for node in by_node for kind in GEMM_TYPES]
        + [(read, pair, seconds) for pair in remote]
    )
    for job, pair, limit in jobs:
        if time.monotonic() - began > limit:
            continue
        try:
            yield job(pair)
        except (CkdistError, OSError) as error:
            yield {"what": "failed", "node": pair[0], "why": str(error)}


if __name__ == "__main__":
    for row in measurements(this_machine(), float(sys.argv[1])):
        print(json.dumps(row), flush=True)
