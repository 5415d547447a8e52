"""The CPUs (hardware threads) of a machine: cores, SMT siblings, packages, NUMA nodes, caches, efficient cores."""

from dataclasses import dataclass

from ckdist.topology.tree import Tree

SYSTEM = "sys/devices/system/cpu"
SLOW = 0.85  # fraction of the largest capacity; cores below it are efficient cores


@dataclass(frozen=True)
class Cpu:
    """One hardware thread. Core and caches are identified by the lowest CPU that shares them."""

    number: int
    package: int
    node: int
    core: int
    sibling: int  # index among the hardware threads of its core
    l2: int
    l3: int
    efficient: bool


def read_cpus(tree: Tree, node_of: dict[int, int], known: tuple[int, ...] = ()) -> tuple[Cpu, ...]:
    """The online CPUs, ascending.

    `node_of` maps CPUs to nodes. `known` are CPUs that exist even if no file lists them.
    """
    online = tree.cpu_list(f"{SYSTEM}/online")
    if not online:
        online = tuple(n for n in tree.numbered(SYSTEM, "cpu") if tree.number(f"{SYSTEM}/cpu{n}/online") != 0)
    numbers = frozenset({*online, *known})
    slow = _slow(tree, numbers)
    return tuple(_read_cpu(tree, number, node_of, numbers, number in slow) for number in sorted(numbers))


def offline_cpus(tree: Tree) -> tuple[int, ...]:
    """CPUs that are present but offline."""
    present = set(tree.cpu_list(f"{SYSTEM}/present"))
    return tuple(sorted(present & set(tree.cpu_list(f"{SYSTEM}/offline"))))


def _read_cpu(tree: Tree, number: int, node_of: dict[int, int], online: frozenset[int], efficient: bool) -> Cpu:
    folder = f"{SYSTEM}/cpu{number}"
    siblings = _sharing(tree.cpu_list(f"{folder}/topology/thread_siblings_list"), number, online)
    package = tree.number(f"{folder}/topology/physical_package_id")
    caches = _caches(tree, f"{folder}/cache", number, online)
    node = node_of.get(number, 0)
    # Some ARM systems have package -1: not known.
    return Cpu(
        number,
        max(0, package or 0),
        node,
        siblings[0],
        siblings.index(number),
        caches.get(2, siblings[0]),
        caches.get(3, -1),
        efficient,
    )


def _sharing(listed: tuple[int, ...], number: int, online: frozenset[int]) -> list[int]:
    """`listed` without offline CPUs; only the CPU itself if the list does not contain it."""
    return [n for n in listed if n in online] if number in listed else [number]


def _caches(tree: Tree, folder: str, number: int, online: frozenset[int]) -> dict[int, int]:
    """Level -> lowest CPU that shares this data cache."""
    shared: dict[int, int] = {}
    for index in tree.numbered(folder, "index"):
        level = tree.number(f"{folder}/index{index}/level")
        if level in (2, 3) and tree.text(f"{folder}/index{index}/type") != "Instruction":
            shared[level] = _sharing(tree.cpu_list(f"{folder}/index{index}/shared_cpu_list"), number, online)[0]
    return shared


def cache_bytes(tree: Tree, cpu: int, level: int) -> int:
    """Size of one CPU's data cache of a level; 0 if not known."""
    folder = f"{SYSTEM}/cpu{cpu}/cache"
    for index in tree.numbered(folder, "index"):
        if (
            tree.number(f"{folder}/index{index}/level") == level
            and tree.text(f"{folder}/index{index}/type") != "Instruction"
        ):
            text = tree.text(f"{folder}/index{index}/size")
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
            digits = text.rstrip("KM")
            return int(digits) * unit if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0
    return 0


def _slow(tree: Tree, numbers: frozenset[int]) -> frozenset[int]:
    """The efficient cores of a hybrid machine: from the kernel's list (x86), or by capacity (ARM)."""
    listed = numbers & frozenset(tree.cpu_list("sys/devices/cpu_atom/cpus"))
    if listed and listed != numbers:
        return listed
    capacity = {n: tree.number(f"{SYSTEM}/cpu{n}/cpu_capacity") or 0 for n in numbers}
    greatest = max(capacity.values(), default=0)
    return frozenset(n for n, c in capacity.items() if 0 < c < SLOW * greatest)
