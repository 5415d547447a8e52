"""NUMA nodes and memory settings of the kernel: sizes, distances, huge pages, swap."""

from dataclasses import dataclass

from ckdist.topology.tree import Tree, kilobytes

SYSTEM = "sys/devices/system/node"
LOCAL = 10  # distance of a node to itself


@dataclass(frozen=True)
class HugePages:
    """Explicit huge pages of one size."""

    page_bytes: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Node:
    """One NUMA node. `cpus` is empty if it has only memory (CXL, high-bandwidth memory)."""

    number: int
    cpus: tuple[int, ...]
    memory: int  # bytes; 0 if not known
    free: int
    distances: dict[int, int]  # to each node
    huge_pages: tuple[HugePages, ...]


@dataclass(frozen=True)
class Memory:
    """The memory of the whole machine, in bytes."""

    total: int
    available: int
    swap: int
    swap_used: int
    huge_pages: tuple[HugePages, ...]
    transparent: str  # always, madvise, never; "" if the kernel has no transparent huge pages


def read_nodes(tree: Tree) -> tuple[Node, ...]:
    """The nodes that have CPUs or memory, ascending; empty if the kernel shows none."""
    numbers = tree.numbered(SYSTEM, "node")
    online = tree.cpu_list(f"{SYSTEM}/online")
    nodes = (_read_node(tree, number, numbers) for number in numbers if not online or number in online)
    return tuple(node for node in nodes if node.cpus or node.memory)


def _read_node(tree: Tree, number: int, numbers: list[int]) -> Node:
    folder = f"{SYSTEM}/node{number}"
    rows = tree.keyed(f"{folder}/meminfo")
    size = lambda name: kilobytes(rows.get(f"Node {number} {name}", ""))
    words = tree.text(f"{folder}/distance").split()
    # The file has one distance per existing node, in order. With any other count it cannot be used.
    valid = len(words) == len(numbers) and all(w.isascii() and w.isdigit() and len(w) < 6 for w in words)
    distances = dict(zip(numbers, map(int, words), strict=True)) if valid else {}
    return Node(
        number,
        tree.cpu_list(f"{folder}/cpulist"),
        size("MemTotal"),
        size("MemFree"),
        distances,
        _huge_pages(tree, f"{folder}/hugepages"),
    )


def _huge_pages(tree: Tree, folder: str) -> tuple[HugePages, ...]:
    pools = []
    for name in tree.names(folder):
        digits = name.removeprefix("hugepages-").removesuffix("kB")
        if name.startswith("hugepages-") and digits.isascii() and digits.isdigit() and len(digits) < 10:
            reserved, free = (
                tree.number(f"{folder}/{name}/{what}") or 0 for what in ("nr_hugepages", "free_hugepages")
            )
            pools.append(HugePages(int(digits) * 1024, reserved, free))
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))


def read_memory(tree: Tree) -> Memory:
    """Reads the memory of the whole machine."""
    rows = tree.keyed("proc/meminfo")
    size = lambda name: kilobytes(rows.get(name, ""))
    modes = tree.text("sys/kernel/mm/transparent_hugepage/enabled").split()
    chosen = next((mode.strip("[]") for mode in modes if mode.startswith("[")), "")
    return Memory(
        total=size("MemTotal"),
        available=size("MemAvailable"),
        swap=size("SwapTotal"),
        swap_used=max(0, size("SwapTotal") - size("SwapFree")),
        huge_pages=_huge_pages(tree, "sys/kernel/mm/hugepages"),
        transparent=chosen,
    )
