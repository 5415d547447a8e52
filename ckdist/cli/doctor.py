"""`ckdist doctor`: reports this machine, the features that work on it, the speed of its nodes, and advice.

It changes nothing, and needs neither privileges nor a model. It ends within ten seconds of its start, even on a busy
machine: probes and measurements share the remaining time and are abandoned or killed when it is over. Under a launcher
only rank 0 reports, for its own host.
"""

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import psutil

from ckdist import __version__
from ckdist.cli.capabilities import TIMEOUT, Capability, capabilities
from ckdist.cli.main import launched_rank
from ckdist.config.commands import DoctorConfig
from ckdist.plan.node_speed import GEMM_TYPES
from ckdist.python_words import module_words
from ckdist.topology import Machine, this_machine
from ckdist.topology.advice import Advice, advise
from ckdist.topology.placement import place_rank, shares, threads_of
from ckdist.topology.tree import format_cpu_list

SECONDS = 9.5  # from the start of this process to its report
TRY_PART = 0.35  # share of the remaining time for probes; the rest is for measurements
MEASURE_SECONDS = 3.0  # no measurement begins later
MEASURE_LIMIT = 5.0  # then the measuring process is killed


def time_left() -> float:
    """Returns the seconds until the report is due. Start-up time counts."""
    return SECONDS - (time.time() - psutil.Process().create_time())


def measure(seconds: float = MEASURE_SECONDS, limit: float = MEASURE_LIMIT) -> list[dict[str, Any]]:
    """Returns the rows that `ckdist.plan.node_speed` prints within `limit` seconds, start-up included."""
    command = module_words("ckdist.plan.node_speed", str(seconds))
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        return [{"what": "failed", "why": f"{sys.executable} does not start: {error.strerror}"}]
    timer = threading.Timer(limit, process.kill)
    timer.start()
    rows = []
    with process:
        for line in process.stdout or ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break  # killed in the middle of a line
    timer.cancel()
    return rows


def gib(size: int | None) -> str:
    """Formats `size` bytes; "?" if the size is unknown."""
    if not size:
        return "?"
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"


def table(rows: list[list[str]]) -> list[str]:
    """Aligns the columns of rows."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def facts(rows: list[tuple[str, str]], width: int) -> list[str]:
    """Formats `name  text` lines. A long text continues below itself."""
    names = max(len(name) for name, _ in rows) + 4
    lines = []
    for name, text in rows:
        folded = textwrap.wrap(text, width - names, break_on_hyphens=False) or [""]
        lines += [f"  {name:<{names - 2}s}{folded[0]}", *(" " * names + more for more in folded[1:])]
    return lines


def machine_lines(machine: Machine, width: int) -> list[str]:
    """Describes the machine and its NUMA nodes."""
    siblings = max((cpu.sibling for cpu in machine.cpus), default=0) + 1
    slow = len({cpu.core for cpu in machine.cpus if cpu.efficient})
    l2, l3 = len({cpu.l2 for cpu in machine.cpus}), len({cpu.l3 for cpu in machine.cpus if cpu.l3 >= 0})
    cores = (
        f"{len(machine.cores())} cores"
        + (f", {slow} of them efficient" if slow else "")
        + (f", {siblings} threads each" if siblings > 1 else "")
    )
    memory = machine.memory
    rows = [
        ("cpu", machine.model or "unknown"),
        (
            "packages",
            f"{len(machine.packages)}, {cores}, NUMA nodes {len(machine.nodes)}"
            + (f" ({machine.cluster_name})" if machine.cluster_name else ""),
        ),
        ("caches", f"L2 {l2} x {gib(machine.l2_bytes)}, L3 {l3} x {gib(machine.l3_bytes)}"),
        ("isa", ", ".join(machine.features) or "nothing beyond the baseline"),
        (
            "memory",
            (
                f"{gib(memory.total)}, {gib(memory.available)} available; "
                f"swap used {gib(memory.swap_used) if memory.swap_used else 'none'}; "
                f"transparent huge pages {memory.transparent or 'absent'}"
            ),
        ),
    ]
    rows += [("offline", f"CPUs {format_cpu_list(machine.offline)}")] if machine.offline else []
    rows += [
        ("rdma", f"{p.device} port {p.port}: {p.state}, {p.link}, {p.rate}, node {'?' if p.node is None else p.node}")
        for p in machine.rdma
    ] or [("rdma", "none")]
    rows += [("over hosts", "the start measures the link and chooses tensor or pipeline parallelism; -pp 1: tensor")]
    rows += [("note", machine.simple)] if machine.simple else []
    nodes = [["node", "package", "cpus", "memory", "free", "huge pages free", "distances"]]
    for node in machine.nodes:
        package = machine.package_of(node.number)
        pools = ", ".join(f"{pool.free} x {gib(pool.page_bytes)}" for pool in node.huge_pages if pool.reserved)
        distances = " ".join(str(distance) for distance in node.distances.values())
        cpus = textwrap.shorten(format_cpu_list(node.cpus).replace(",", ", "), 34, placeholder=" ...").replace(
            ", ", ","
        )
        nodes.append(
            [
                str(node.number),
                "-" if package is None else str(package),
                cpus or "none",
                gib(node.memory),
                gib(node.free),
                pools or "none",
                distances,
            ]
        )
    return [*facts(rows, width), "", *table(nodes)]


def binding_lines(machine: Machine, width: int) -> list[str]:
    """Describes the limits of this process, and its launcher."""
    binding, group = machine.binding, machine.control_group
    limits = [f"memory {gib(group.memory)} ({gib(group.memory_used)} used)"] if group.memory else []
    limits += [f"{group.quota:.1f} CPUs' worth of time"] if group.quota is not None else []
    limits += [f"cpuset {format_cpu_list(group.cpus)}"] if group.cpus else []
    nodes = "any" if binding.memory_nodes is None else format_cpu_list(binding.memory_nodes)
    rows = [
        ("may use", f"CPUs {format_cpu_list(binding.cpus)}, memory of nodes {nodes}, policy {binding.memory_policy}"),
        ("started by", binding.launcher or "no launcher"),
        ("control group", "; ".join(limits) or "no limits"),
    ]
    rows += [("asked for", f"{name}={value}") for name, value in binding.asked.items()]
    return facts(rows, width)


def placement_lines(machine: Machine) -> list[str]:
    """Shows where ranks would run without a binding, one on each node."""
    mask = machine.binding.cpus
    ranks = max(1, len({machine.by_number[cpu].node for cpu in mask if cpu in machine.by_number}))
    ranges = shares(machine, [mask] * ranks)
    quota = machine.control_group.quota
    quota = None if quota is None else quota / ranks
    rows = [["rank", "node", "threads", "cpus"]]
    for rank in range(ranks):
        threads = threads_of(machine, ranges[rank], rank == 0, quota)
        place = place_rank(machine, [mask] * ranks, rank, threads, quota)
        rows.append([str(rank), format_cpu_list(place.nodes), str(threads), format_cpu_list(place.cpus) or "any"])
    return table(rows)


def speed_lines(machine: Machine, rows: list[dict[str, Any]]) -> list[str]:
    """Formats the rows of `measure` by node."""
    reads = {(row["node"], row["memory"]): row["rate"] for row in rows if row["what"] == "read"}
    products = {(row["node"], row["type"]): row["rate"] for row in rows if row["what"] == "gemm"}
    if not reads and not products:
        why = next((row["why"] for row in rows if row["what"] == "failed"), "the machine is too busy")
        return [f"  nothing was measured: {why}"]
    lines = [["cpus of", *(f"{kind} GFLOP/s" for kind in GEMM_TYPES), "GB/s from its own memory"]]
    for node in sorted({node for node, _ in [*reads, *products]}):
        cells = [f"{products[node, kind] / 1e9:.0f}" if (node, kind) in products else "-" for kind in GEMM_TYPES]
        lines.append([f"node {node}", *cells, f"{reads[node, node] / 1e9:.1f}" if (node, node) in reads else "-"])
    text = table(lines)
    pairs = [["cpus of", "memory of", "GB/s", "slower than its own"]]
    for cpus, memory in sorted(pair for pair in reads if pair[0] != pair[1]):
        slower = (
            f"{reads[cpus, cpus] / reads[cpus, memory]:.2f} times"
            if (cpus, cpus) in reads and reads[cpus, memory]
            else "-"
        )
        pairs.append([f"node {cpus}", f"node {memory}", f"{reads[cpus, memory] / 1e9:.1f}", slower])
    if len(pairs) > 1:
        text += ["", *table(pairs)]
    penalty = remote_penalty(reads)
    if penalty:
        text.append(f"  reading another node's memory is {penalty:.2f} times slower than reading one's own")
    elif len(machine.nodes) == 1:
        text.append("  one node: no memory is remote")
    return text


def remote_penalty(reads: dict[tuple[int, int], float]) -> float | None:
    """Returns how many times slower CPUs read another node's memory than their own, as a mean over the measured pairs.

    Only nodes with CPUs count. None if no pair was measured.
    """
    own = {cpus: rate for (cpus, memory), rate in reads.items() if cpus == memory}
    ratios = [
        own[cpus] / rate
        for (cpus, memory), rate in reads.items()
        if cpus != memory and cpus in own and memory in own and rate
    ]
    return sum(ratios) / len(ratios) if ratios else None


def capability_lines(found: list[Capability], width: int) -> list[str]:
    """Lists the capabilities, with the reason for each that does not work."""
    return facts(
        [(f"{one.group:<11s} {one.name:<15s} {'yes' if one.works else 'no':<3s}", one.about) for one in found], width
    )


def advice_lines(advice: tuple[Advice, ...], width: int) -> list[str]:
    """Lists each piece of advice with its command."""
    if not advice:
        return ["  nothing"]
    lines = []
    for number, one in enumerate(advice, 1):
        lines += textwrap.wrap(
            f"{one.finding}: {one.why}",
            width,
            initial_indent=f"  {number}. ",
            subsequent_indent="     ",
            break_on_hyphens=False,
        )
        lines.append(f"     $ {one.command}")
    return lines


def text_of(
    machine: Machine, found: list[Capability], speed: list[dict[str, Any]], advice: tuple[Advice, ...], width: int
) -> str:
    """Returns the whole report, in lines of at most `width` characters where words allow it."""
    sections = [
        ("Machine", machine_lines(machine, width)),
        ("This process", binding_lines(machine, width)),
        ("Placement, one rank per node", placement_lines(machine)),
        ("Works here", capability_lines(found, width)),
        ("Measured", speed_lines(machine, speed)),
        ("To change", advice_lines(advice, width)),
    ]
    head = f"ckdist {__version__} on {socket.gethostname()}"
    return "\n".join([head, *(line for name, lines in sections for line in ("", name, *lines))])


def machine_facts(machine: Machine) -> dict[str, Any]:
    """Returns the machine for JSON."""
    read = {name: value for name, value in dataclasses.asdict(machine).items() if name != "tree"}
    ports = [dataclasses.asdict(port) for port in machine.rdma]
    return {**read, "rdma": ports, "packages": len(machine.packages), "clusters": machine.cluster_name}


def run(config: DoctorConfig) -> int:
    """Prints the report, or one JSON object. Returns 0."""
    if launched_rank():
        return 0
    machine = this_machine()
    advice = advise(machine)
    found = capabilities(machine, min(TIMEOUT, max(0.1, TRY_PART * time_left())))
    limit = min(MEASURE_LIMIT, time_left())
    speed = measure(limit * MEASURE_SECONDS / MEASURE_LIMIT, limit) if limit > 0 else []
    if config.json:
        reads = {(row["node"], row["memory"]): row["rate"] for row in speed if row["what"] == "read"}
        print(
            json.dumps(
                {
                    "version": __version__,
                    "host": socket.gethostname(),
                    "machine": machine_facts(machine),
                    "capabilities": [dataclasses.asdict(one) for one in found],
                    "speed": speed,
                    "remote_penalty": remote_penalty(reads),
                    "advice": [dataclasses.asdict(one) for one in advice],
                },
                indent=1,
            )
        )
    else:
        print(text_of(machine, found, speed, advice, max(80, min(120, shutil.get_terminal_size((100, 24)).columns))))
    return 0
