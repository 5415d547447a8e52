"""Measures this machine as a MachineSpec: memory, products of each type, attention, barriers of threads.

It takes about ten seconds and runs on one rank. `ckdist.cli.measured_machine` adds the exchange between ranks and the
fixed costs of a step.
"""

import dataclasses
from collections.abc import Callable

from ckdist import native
from ckdist.planning.kernel_speed import COLS, attention_rate, elementwise_rate, product_rate, product_rates
from ckdist.planning.machine_spec import MEASURED, MachineSpec
from ckdist.planning.rank_plan import SPINS
from ckdist.topology import Machine
from ckdist.topology.arithmetic import ARITHMETIC, arithmetic_rate
from ckdist.topology.bandwidth import PASSES, node_cpus, read_bandwidth, read_node
from ckdist.weights import dtypes

SECONDS = 0.01  # time of one measurement of a product; it is repeated
STREAMED = "BF16", "Q8_0", "Q4_K"  # types whose products are also measured with weights from memory
UNCERTAINTY = 0.15
LEAST_STREAMED = 96 << 20  # bytes of weights per thread, so that they come from memory


def machine_title(machine: Machine) -> str:
    """The name of a machine in its file."""
    return machine.model[:80] or "this machine"


def measure_machine(machine: Machine, log_name: Callable[[str], object] = lambda _: None) -> MachineSpec:
    """Measures the first node with CPUs that this process may use. Other nodes are assumed to be equal.

    `log_name` is called with the name of each measurement before it starts.
    """
    nodes = node_cpus(machine)
    first, cpus = next(iter(nodes.items()))
    log_name("memory")
    bandwidth = read_node(machine, cpus, first, PASSES)
    remote = [bandwidth / read_node(machine, cpus, node, 3) for node in nodes if node != first]
    core = max(read_bandwidth(1, cpus[:1], PASSES), bandwidth / len(cpus))
    log_name("arithmetic")
    f32, bf16, int8 = (arithmetic_rate(len(cpus), cpus, form) / len(cpus) for form in ARITHMETIC)
    log_name("products")
    products = {kind.name: product_rates(cpus, kind.number, SECONDS) for kind in dtypes.KNOWN}
    log_name("attention, norms and barriers")
    barrier = native.call(native.lib.ckdist_barrier_seconds, len(cpus), cpus, SPINS)
    spec = MachineSpec(
        name=machine_title(machine),
        source=MEASURED,
        isa=native.isa(),
        uncertainty=UNCERTAINTY,
        sockets=max(1, len(machine.packages)) if len(nodes) % max(1, len(machine.packages)) == 0 else 1,
        nodes=len(nodes),
        cores=len(cpus),
        memory=float(machine.memory.total or native.lib.ckdist_available_memory()) / len(nodes),
        bandwidth=bandwidth,
        achieved_bandwidth=1.0,
        core_bandwidth=core,
        remote=max(1.0, sum(remote) / len(remote)) if remote else 1.0,
        f32=f32,
        bf16=bf16,
        int8=int8,
        achieved_arithmetic=1.0,
        attention=attention_rate(cpus[0], "i16", 10 * SECONDS),
        elementwise=elementwise_rate(cpus[0], 5 * SECONDS),
        barrier=barrier if len(cpus) > 1 else 0.0,
        products=products,
    )
    log_name("products with weights from memory")
    return _with_overlap(spec, cpus)


def _with_overlap(spec: MachineSpec, cpus: list[int]) -> MachineSpec:
    """Adds the measured `overlap_loss`: the mean over products of one row with weights from memory.

    loss = (seconds - max(read, computed)) / min(read, computed).
    """
    losses, rate = [], spec.read_rate(len(cpus))
    for name in STREAMED:
        kind = dtypes.BY_NAME[name]
        rows = int(LEAST_STREAMED / COLS * kind.block_elements / kind.block_bytes) // 16 * 16
        rows = min(rows, native.lib.ckdist_available_memory() // (8 * len(cpus) * COLS) // 16 * 16)
        elements = float(rows * COLS * len(cpus))
        took = 2.0 * elements / (len(cpus) * product_rate(cpus, kind.number, 1, 5 * SECONDS, rows))
        read = elements * kind.block_bytes / kind.block_elements / rate
        computed = 2.0 * elements / (len(cpus) * spec.product_rate(name, 0, 1))
        losses.append((took - max(read, computed)) / min(read, computed))
    return dataclasses.replace(spec, overlap_loss=min(1.0, max(0.0, sum(losses) / len(losses))))


__all__ = ["machine_title", "measure_machine"]
