"""How fast each NUMA node reads memory and multiplies matrices: a process of its own, which prints one JSON line per
measurement.

It is started by `ckdist doctor`, which takes what was measured in time and ends it: python -m ckdist.cli.node_speed
SECONDS.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ckdist.errors import CkdistError
from ckdist.planning.kernel_speed import product_rate
from ckdist.topology import Machine, this_machine
from ckdist.topology.bandwidth import REPEATS, node_cpus, read_node

GEMM_TYPES = {"BF16": 30, "F32": 0, "Q8_0": 8}
GEMM_TOKENS = 256
GEMM_SECONDS = 0.3
GEMM_UNTIL = 2 / 3  # of the time: no product begins later, so that some is left for reads across nodes


def multiply_on(cpus: list[int], kind: str, seconds: float) -> float:
    """Operations per second in products of GEMM_TOKENS rows on every one of `cpus` at once, each with its own: one pass
    of about so many seconds.
    """
    return len(cpus) * product_rate(cpus, GEMM_TYPES[kind], GEMM_TOKENS, seconds, repeats=1)


def measurements(machine: Machine, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields what there is to measure, most wanted first: local reads, products in two thirds of the time, then
    reads across nodes as time allows.
    """
    began = time.monotonic()
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
            "rate": read_node(machine, by_node[pair[0]], pair[1], REPEATS),
        }

    def multiply(pair: tuple[int, Any]) -> dict[str, Any]:
        """On the CPUs of a node, in one of GEMM_TYPES."""
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
