"""The limits of this process's control groups and of their parents, versions 1 and 2: memory, CPUs and CPU time."""

from collections.abc import Iterator
from dataclasses import dataclass

from ckdist.topology.tree import Tree, parse_cpu_list

NO_LIMIT = 1 << 60  # version 1 has a number near 2^63 if there is no limit


@dataclass(frozen=True)
class ControlGroup:
    """The tightest limits; None: no limit."""

    memory: int | None  # bytes
    memory_used: int | None  # bytes used in the group with that limit
    cpus: tuple[int, ...] | None
    memory_nodes: tuple[int, ...] | None
    quotas: tuple[tuple[str, float], ...]  # (folder of a group, CPUs of time), from this process's group to its parents

    @property
    def quota(self) -> float | None:
        """The smallest quota in CPUs of time."""
        return min((cpus for _, cpus in self.quotas), default=None)


def read_control_group(tree: Tree) -> ControlGroup:
    """Reads the limits of this process's control groups."""
    groups: dict[str, str] = {}  # controller -> path; "" is version 2
    for line in tree.text("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if ".." not in path.split("/"):
            groups.update((controller, path) for controller in controllers.split(","))
    memory: list[tuple[int, int | None]] = []
    quotas: list[tuple[str, float]] = []
    for folder in _up(groups, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            bound = tree.number(f"{folder}/{limit}")
            if bound is not None and bound < NO_LIMIT:
                memory.append((bound, tree.number(f"{folder}/{used}")))
    for folder in _up(groups, "cpu"):
        words = tree.text(f"{folder}/cpu.max").split() or [
            tree.text(f"{folder}/cpu.cfs_{what}_us") for what in ("quota", "period")
        ]
        if len(words) == 2 and all(w.isascii() and w.isdigit() and 0 < len(w) < 16 for w in words) and int(words[1]):
            quotas.append((folder, int(words[0]) / int(words[1])))
    limit, used = min(memory, default=(None, None), key=lambda pair: pair[0])
    return ControlGroup(limit, used, _list(tree, groups, "cpus"), _list(tree, groups, "mems"), tuple(quotas))


def _up(groups: dict[str, str], controller: str) -> Iterator[str]:
    """The folders of this process's group and its parents, for all mount points of a controller."""
    for mount, path in (
        ("sys/fs/cgroup", groups.get("")),
        ("sys/fs/cgroup/unified", groups.get("")),
        (f"sys/fs/cgroup/{controller}", groups.get(controller)),
        ("sys/fs/cgroup/cpu,cpuacct", groups.get(controller) if controller == "cpu" else None),
    ):
        if path is None:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield "/".join([mount, *parts[:depth]])


def _list(tree: Tree, groups: dict[str, str], what: str) -> tuple[int, ...] | None:
    """The effective list of CPUs or memory nodes of the nearest group that has one."""
    for folder in _up(groups, "cpuset"):
        for name in (f"cpuset.{what}.effective", f"cpuset.effective_{what}", f"cpuset.{what}"):
            text = tree.text(f"{folder}/{name}")
            try:
                if text:
                    return parse_cpu_list(text)
            except ValueError:
                pass
    return None
