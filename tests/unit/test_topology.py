"""Machines read from trees of files as the kernel would show them, ranks divided over them, and pages asked for
where they are.
"""

import dataclasses
import gc
import os
import pathlib
import random
import re
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist import native
from ckdist.topology import bind_memory, read_machine, this_machine
from ckdist.topology.pages import Huge, Pages, huge_pages, sample_pages
from ckdist.topology.placement import (
    Placement,
    place_rank,
    ranks_per_node,
    shared_quota,
    shares,
    threads_first,
    threads_of,
)
from ckdist.topology.tree import format_cpu_list, parse_cpu_list
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.loader import ShardLoader
from tests.support.cases import cases
from tests.support.paths import ROOT
from tests.support.trees.layouts import GIB, LAYOUTS, Layout, folder_in_memory, hybrid


@pytest.fixture
def tmp_path():
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def recorded():
    """The machine of a named layout, written and read once."""
    machines = {}

    def read(name: str):
        if name not in machines:
            layout = hybrid() if name == "hybrid" else LAYOUTS[name][0]
            machines[name] = machine_of(layout, folder / name)
        return machines[name]

    with folder_in_memory() as folder:
        yield read


GARBAGE = (b"", b"\xff\x00\xfe", b"0-99999999", b"9" * 40, b"-1", b"3-1,x", "٣".encode())


def machine_of(layout: Layout, tmp_path, environment=None):
    return read_machine(layout.write(tmp_path), environment=environment or {})


def places(machine, ranks: int, threads: int | None = None, masks=None) -> list[Placement]:
    masks = masks or [machine.binding.cpus] * ranks
    cut = shares(machine, masks)
    quota = shared_quota(machine.control_group.quotas, [[group for group, _ in machine.control_group.quotas]] * ranks)
    given = [threads or threads_of(machine, cut[r], r == 0, quota) for r in range(ranks)]
    return [place_rank(machine, masks, r, given[r], quota) for r in range(ranks)]


class TestReading:
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_layouts(self, name, recorded):
        layout, nodes, clusters, cluster_name, cores = LAYOUTS[name]
        machine = recorded(name)
        assert sum(bool(node.cpus) for node in machine.nodes) == nodes
        assert (machine.clusters, machine.cluster_name) == (clusters, cluster_name)
        assert len(machine.cores()) == cores
        assert len(machine.packages) == layout.packages
        assert machine.offline == layout.offline
        assert machine.l2_bytes == 2 << 20 and machine.l3_bytes == 32 << 20
        assert {cpu.sibling for cpu in machine.cpus} == set(range(layout.smt))
        assert bool(machine.simple) == (not layout.nodes)

    def test_distances_and_a_node_without_cpus(self, recorded):
        machine = recorded("memory node")
        assert [node.cpus == () for node in machine.nodes] == [False, False, True, True]
        assert machine.distance(0, 1) == 21 and machine.distance(0, 2) == 14 and machine.distance(1, 3) == 24
        assert all(node.memory == 64 * GIB for node in machine.nodes)

    def test_hybrid_by_list_and_by_capacity(self, tmp_path):
        machine = machine_of(hybrid(), tmp_path / "x86")
        assert [cpu.number for cpu in machine.cpus if cpu.efficient] == list(range(12, 20))
        assert len(machine.cores()) == 14
        capacity = {
            f"sys/devices/system/cpu/cpu{n}/cpu_capacity": "446" if n < 4 else "1024" if n == 7 else "990"
            for n in range(8)
        }
        machine = machine_of(Layout(cores=8, extra=capacity), tmp_path / "arm")
        assert [cpu.number for cpu in machine.cpus if cpu.efficient] == [0, 1, 2, 3]

    def test_features(self, recorded):
        machine = recorded("SNC-4")
        assert {"avx512_bf16", "amx_int8"} <= set(machine.features) and "fpu" not in machine.features
        assert machine.amx in ("granted", "refused", "absent")

    @pytest.mark.parametrize(
        "part, model", [("0xd40", "Arm Neoverse V1"), ("0xfff", "Arm implementer 0x41, part 0xfff")]
    )
    def test_arm(self, tmp_path, part, model):
        text = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU implementer\t: 0x41\n"
        text += f"CPU part\t: {part}\n\nprocessor\t: 1\n"
        machine = machine_of(Layout(extra={"proc/cpuinfo": text}), tmp_path)
        assert (
            machine.model == model
            and machine.features == ("asimd", "asimddp", "i8mm", "bf16")
            and machine.amx == "absent"
        )

    def test_devices(self, tmp_path):
        port = "sys/class/infiniband/mlx5_0"
        extra = {
            f"{port}/device/numa_node": "1",
            f"{port}/ports/1/state": "4: ACTIVE",
            f"{port}/ports/1/link_layer": "Ethernet",
            f"{port}/ports/1/rate": "100 Gb/sec (4X EDR)",
        }
        machine = machine_of(Layout(packages=2, extra=extra), tmp_path)
        (rdma,) = machine.rdma
        assert (rdma.device, rdma.port, rdma.node, rdma.state, rdma.link) == ("mlx5_0", 1, 1, "ACTIVE", "Ethernet")

    def test_control_groups_of_both_versions(self, tmp_path):
        second = {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(GIB),
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/cpu.max": "700000 100000",
            "sys/fs/cgroup/pod/box/cpu.max": "250000 100000",
            "sys/fs/cgroup/pod/cpuset.cpus.effective": "0-2",
        }
        group = machine_of(Layout(extra=second), tmp_path / "2").control_group
        assert (group.memory, group.memory_used, group.quota, group.cpus) == (8 * GIB, GIB, 2.5, (0, 1, 2))
        first = {
            "proc/self/cgroup": "4:memory:/job\n3:cpuset:/job\n1:cpu,cpuacct:/job",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpuset/job/cpuset.cpus": "1,3",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        }
        group = machine_of(Layout(extra=first), tmp_path / "1").control_group
        assert (group.memory, group.cpus, group.quota) == (GIB, (1, 3), None)

    def test_launchers(self, tmp_path):
        environment = {"SLURM_STEP_ID": "0", "SLURM_CPU_BIND": "quiet,mask_cpu:0x3", "PMIX_RANK": "0"}
        binding = machine_of(Layout(), tmp_path, environment).binding
        assert binding.launcher == "Slurm" and binding.asked == {"SLURM_CPU_BIND": "quiet,mask_cpu:0x3"}
        assert read_machine(tmp_path, {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}).binding.launcher == "Open MPI"

    def test_garbage_is_no_machine_and_no_error(self, tmp_path):
        """Every file of a tree, one after the other, replaced by what it should never hold."""
        root = Layout(packages=2, cores=2).write(tmp_path)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        random.seed(3)
        for path in files:
            kept = path.read_bytes()
            for garbage in random.sample(GARBAGE, 2):
                path.write_bytes(garbage)
                machine = read_machine(root, {})
                masks = [machine.binding.cpus or (0,)] * 3
                assert machine.nodes and all(place_rank(machine, masks, r, 1).share for r in range(3)), (path, garbage)
            path.write_bytes(kept)
        for path in files:
            path.write_bytes(random.randbytes(60))
        assert read_machine(root, {}).nodes

    def test_this_machine(self):
        machine = this_machine()
        assert set(os.sched_getaffinity(0)) <= set(machine.binding.cpus) <= set(machine.by_number)
        assert machine.memory.total > machine.memory.available > 0

    @given(st.sets(st.integers(0, 300)))
    @settings(max_examples=50)
    def test_lists(self, numbers):
        assert parse_cpu_list(format_cpu_list(numbers)) == tuple(sorted(numbers))

    @pytest.mark.parametrize("text", ["a", "1-", "-1", "1--2", "0-70000", "1 2", "٣", "1-2-3"])
    def test_lists_that_are_none(self, text):
        with pytest.raises(ValueError):
            parse_cpu_list(text)


class TestPlacement:
    @cases("name, ranks", product([*LAYOUTS, "hybrid"], [1, 2, 3, 4, 7, 8, 13]))
    def test_every_layout(self, name, ranks, recorded):
        """Shares never overlap, leave nothing out, never cut a core, and stay in a node where there are ranks
        enough.
        """
        machine = recorded(name)
        if ranks > len(machine.cores()):
            return
        everyone = places(machine, ranks)
        together = [cpu for place in everyone for cpu in place.share]
        assert sorted(together) == [cpu.number for cpu in machine.cpus]
        cores = [machine.cores(place.share) for place in everyone]
        assert sum(map(len, cores)) == len(machine.cores())
        with_cpus = sum(bool(node.cpus) for node in machine.nodes)
        sizes = [len(place.nodes) for place in everyone]
        if ranks >= with_cpus:
            assert set(sizes) == {1}
            per_node = [sum(place.node == node.number for place in everyone) for node in machine.nodes if node.cpus]
            assert max(per_node) - min(per_node) <= 1
        else:
            assert sum(sizes) == with_cpus and max(sizes) - min(sizes) <= 1
        for place in everyone:
            assert not place.crowded and not place.bound and len(set(place.cpus)) == len(place.cpus) >= 1
            fast = {machine.by_number[n].core for n in place.share if not machine.by_number[n].efficient}
            assert len({machine.by_number[n].core for n in place.cpus}) == len(place.cpus) <= len(fast or place.share)

    def test_a_core_for_the_front_end(self, recorded):
        machine = recorded("two sockets")
        first, second = places(machine, 2)
        assert first.cpus == tuple(range(27)) and second.cpus == tuple(range(28, 56))
        assert [len(place.cpus) for place in places(machine, 8)] == [7] * 8, "fewer than eight cores keep them all"

    def test_memory_follows(self, recorded, tmp_path):
        first, second = places(recorded("memory node"), 2)
        assert (first.memory, second.memory, first.sharers) == ((0,), (1,), 1)
        alone = places(recorded("SNC-2"), 1)[0]
        assert alone.memory == (0, 1, 2, 3) and "one rank for 4 NUMA nodes" in alone.note
        assert [p.sharers for p in places(recorded("two sockets"), 4)] == [2] * 4
        fenced = machine_of(dataclasses.replace(LAYOUTS["two sockets"][0], memory_nodes="0"), tmp_path)
        assert [p.memory for p in places(fenced, 2)] == [(0,), (0,)], "node 1 is not this process's to use"

    def test_smt_last(self, recorded):
        machine = recorded("one socket")
        assert threads_first(machine, tuple(range(32))) == list(range(32))
        assert places(machine, 2, threads=16)[0].cpus == (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
        assert threads_first(machine, (16, 17, 1)) == [1, 16, 17], (
            "the second thread of a core stands for it where the first is not ours"
        )

    def test_hybrid(self, recorded):
        machine = recorded("hybrid")
        assert threads_first(machine, tuple(range(20))) == [0, 2, 4, 6, 8, 10, *range(12, 20), 1, 3, 5, 7, 9, 11]
        for place in places(machine, 2):
            kinds = [machine.by_number[n].efficient for n in place.share]
            assert (kinds.count(False), kinds.count(True)) == (6, 4) and len(place.cpus) == 3

    def test_a_cpuset_that_cuts_a_node(self, tmp_path):
        machine = machine_of(Layout(packages=2, cores=8, allowed="0-7,8"), tmp_path)
        assert [p.share for p in places(machine, 2)] == [tuple(range(8)), (8,)]
        assert [p.share for p in places(machine, 3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
        assert [len(p.share) for p in places(machine, 5)] == [2, 2, 2, 2, 1], (
            "the cut node has a core for one rank alone"
        )
        assert not any(p.crowded or p.bound for p in places(machine, 5))

    def test_a_launchers_binding_is_kept(self, tmp_path):
        machine = machine_of(Layout(packages=2, cores=4, smt=2), tmp_path)
        masks = [(0, 8), (4, 12)]
        assert [(p.share, p.cpus, p.bound) for p in places(machine, 2, masks=masks)] == [
            ((0, 8), (0,), True),
            ((4, 12), (4,), True),
        ]
        assert "bound the ranks to 2 of 8 cores" in places(machine, 2, masks=masks)[0].note
        sockets = [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
        assert [p.share for p in places(machine, 4, masks=sockets)] == [(0, 1), (4, 5), (2, 3), (6, 7)], (
            "ranks of one mask divide it"
        )

    @pytest.mark.parametrize("quota, threads", [("50000", 1), ("350000", 3), ("600000", 6), ("max", 6)])
    def test_threads_are_no_more_than_a_quota(self, quota, threads, tmp_path):
        """Of a container with six cores; those that a quota limits are not pinned beside another container's."""
        files = {"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/cpu.max": f"{quota} 100000"}
        machine = machine_of(Layout(cores=6, extra=files), tmp_path)
        (place,) = places(machine, 1)
        assert place.threads == threads and place.cpus == (() if threads < 6 else tuple(range(6)))
        assert not place.is_over_quota and bool(place.note) == (threads < 6)
        assert places(machine, 1, threads=6)[0].is_over_quota == (threads < 6), "-t rules, with a warning"

    def test_a_real_group_limits_the_threads(self):
        """Of the CPU controller's version 1 or 2; its quota is one CPU, of which this machine has more."""
        root = next((r for r in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") if os.path.exists(f"{r}/cgroup.procs")), "")
        group = f"{root}/ckdist-{os.getpid()}"
        try:
            os.mkdir(group)
        except OSError:
            pytest.skip("no control group can be made here")
        try:
            for name, text in (("cpu.cfs_quota_us", "100000"), ("cpu.max", "100000 100000")):
                if os.path.exists(f"{group}/{name}"):
                    pathlib.Path(group, name).write_text(text)
                    break
            else:
                pytest.skip("its CPU controller is off")
            code = "import os; open(os.environ['G'] + '/cgroup.procs', 'w').write('0'); from ckdist.topology import *; "
            code += "from ckdist.comm.world import SingleWorld as w; print(default_threads(w()), place(w()).quota)"
            done = subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, "G": group}, capture_output=True, text=True, timeout=60
            )
        finally:
            os.rmdir(group)
        assert done.stdout.split() == ["1", "1.0" if len(this_machine().cores()) > 1 else "None"], done.stderr

    def test_ranks_of_one_group_share_its_quota(self, tmp_path):
        """One group above both ranks, and a smaller one of each rank's own."""
        quotas = (("/pod/a", 4.0), ("/pod", 6.0))
        assert shared_quota(quotas, [["/pod/a", "/pod"], ["/pod/b", "/pod"]]) == 3.0
        assert shared_quota(quotas, [["/pod/a", "/pod"]]) == 4.0
        assert shared_quota((), [[], []]) is None
        machine = machine_of(Layout(cores=8), tmp_path)
        assert [threads_of(machine, (0, 1, 2, 3), False, quota) for quota in (3.0, 1.5, 0.2, 9.0)] == [3, 1, 1, 4]

    def test_more_ranks_than_cores(self, tmp_path):
        machine = machine_of(Layout(cores=2, smt=2), tmp_path)
        assert sorted(p.share for p in places(machine, 4)) == [(0,), (1,), (2,), (3,)], "hardware threads"
        assert all(p.crowded and not p.cpus for p in places(machine, 5))
        assert places(machine, 1, threads=5)[0].crowded

    def test_simple_schemes_say_so(self, recorded, tmp_path):
        none = places(recorded("no nodes"), 2)
        assert [p.share for p in none] == [tuple(range(8)), tuple(range(8, 16))] and none[0].memory == ()
        assert "no NUMA nodes" in none[0].note
        one = Layout(
            packages=2,
            extra={"sys/devices/system/node/node0/cpulist": "0-7", "sys/devices/system/node/node1/cpulist": ""},
        )
        one.extra["sys/devices/system/node/node1/meminfo"] = ""
        assert "node interleaving" in places(machine_of(one, tmp_path), 2)[0].note

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 60))
    @settings(max_examples=200)
    def test_ranks_per_node(self, cores, more):
        ranks = len(cores) + more
        counts = ranks_per_node(cores, ranks)
        assert sum(counts) == ranks and min(counts) >= 1
        if ranks <= sum(cores):
            assert all(count <= have for count, have in zip(counts, cores, strict=True))


NODES = [node.number for node in this_machine().nodes if node.memory]
RESERVED = any(pool.free > 8 for pool in this_machine().memory.huge_pages if pool.page_bytes == 2 << 20)


def load_weights() -> ShardLoader:
    """A small model's matrices in an arena of their own."""
    checkpoint = open_checkpoint(ROOT / "tests/golden/llama3")
    loader = ShardLoader(checkpoint, 1)
    for name, source in checkpoint.tensors.items():
        if len(source.shape) == 2:
            loader.add_matrix(name, [(0, source.shape[0])])
    loader.load(progress=False)
    return loader


def bind_to(nodes: tuple[int, ...], sharers: int = 1) -> None:
    bind_memory(Placement((), (0,), nodes, nodes, sharers, False, False, ""))


@pytest.fixture
def unbound():
    yield
    bind_to(())


@pytest.mark.usefixtures("unbound")
class TestNuma:
    """Needs a machine of several nodes; the virtual one of the project's tests has two."""

    @pytest.mark.skipif(len(NODES) < 2, reason="one NUMA node")
    @pytest.mark.parametrize("node", NODES[:4])
    @pytest.mark.parametrize("sharers, policy", [(1, 2), (1 << 30, 1)])
    def test_pages_go_where_they_are_bound(self, node, sharers, policy):
        """Whichever node the threads that touch them are on; a node without room for all is only preferred, as are
        reserved pages.
        """
        bind_to((node,), sharers)
        loader = load_weights()
        assert native.lib.ckdist_memory_policy(loader.arena) == (1 if RESERVED else policy)
        pages = sample_pages(loader.arena, loader.planned_bytes, (node,))
        assert (pages.here, pages.elsewhere) == (64, 0)

    @pytest.mark.skipif(len(NODES) < 2, reason="one NUMA node")
    def test_several_nodes_are_interleaved(self):
        bind_to(tuple(NODES))
        assert native.lib.ckdist_memory_policy(load_weights().arena) == 3

    @pytest.mark.skipif(not RESERVED, reason="no huge pages are reserved")
    def test_reserved_huge_pages_are_used(self):
        held = lambda: int(re.search(r"HugetlbPages:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])
        gc.collect()
        before = held()
        bind_to((NODES[-1],) if len(NODES) > 1 else ())
        loader = load_weights()
        assert held() - before >= 2048
        assert str(huge_pages([(loader.arena, loader.planned_bytes)])) == "100 % reserved"
        assert sample_pages(loader.arena, loader.planned_bytes, (NODES[-1],)).elsewhere == 0
        del loader
        gc.collect()
        assert held() == before


class TestPages:
    def test_pages_are_asked_for(self):
        block = np.ones(1 << 20, np.uint8)
        pages = sample_pages(native.pointer(block), block.nbytes, tuple(node.number for node in this_machine().nodes))
        assert pages.refused or (pages.here == 64 and pages.elsewhere == 0)
        pages = sample_pages(native.pointer(block), block.nbytes, (999,))
        assert pages.refused or pages.here == 0

    def test_untouched_pages_are_made_only_when_asked(self):
        import mmap

        area = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = native.ffi.from_buffer(area)
        everywhere = tuple(node.number for node in this_machine().nodes)
        assert sample_pages(address, len(area), everywhere).here == 0
        pages = sample_pages(address, len(area), everywhere, touch=True)
        assert pages.refused or pages.here == 64
        assert bytes(area) == bytes(1 << 20)

    def test_huge_pages_are_told(self, tmp_path):
        maps = tmp_path / "smaps"
        reserved = "7f0000000000-7f0000400000 rw-p 00000000 00:0f 12 /anon_hugepage (deleted)\nRss: 0 kB\n"
        reserved += "Private_Hugetlb: 4096 kB\n"
        mixed = (
            "7f1000000000-7f1000800000 rw-p 00000000 00:00 0 \nRss: 4096 kB\nAnonHugePages: 2048 kB\nVmFlags: rd wr\n"
        )
        maps.write_text(reserved + mixed)
        assert str(huge_pages([(0x7F0000000000, 4 << 20)], maps)) == "100 % reserved"
        assert str(huge_pages([(0x7F1000000000, 8 << 20)], maps)) == "50 % transparent"
        assert huge_pages([(0x7F0000000000, 2 << 20), (0x7F1000400000, 4 << 20)], maps) == Huge(
            2 << 20, 1 << 20, 4 << 20
        )
        assert (
            str(huge_pages([(0x1000, 4096)], maps)) == str(huge_pages([(0x1000, 4096)], "/no/such/file")) == "unknown"
        )
        block = np.ones(1 << 20, np.uint8)
        told = huge_pages([(native.pointer(block), block.nbytes)])
        assert 0 < told.resident <= 2 * block.nbytes

    def test_sums_and_refusals(self):
        assert str(Pages(3, 1) + Pages(60, 0)) == "63 / 1"
        assert str(Pages(3, 1) + Pages(0, 0, "operation not permitted")) == "unknown"

    def test_policies(self):
        policy = native.lib.ckdist_memory_policy(native.ffi.NULL)
        assert policy >= 0 or -policy in (1, 38)
        assert native.lib.ckdist_request_amx() in (0, 1) or this_machine().amx == "refused"


def test_lost_cores_are_counted_again_and_the_mask_is_the_first_one():
    """A measurement compares two counts; a rank that is pinned still knows which CPUs it was given."""
    script = (
        "import os, resource, types; from ckdist.topology import binding; given = binding.own_cpus(); "
        "os.sched_setaffinity(0, given[:1]); assert binding.own_cpus() == given, binding.own_cpus(); "
        "counts = iter((3, 5)); resource.getrusage = lambda who: types.SimpleNamespace(ru_nivcsw=next(counts)); "
        "assert [binding.times_preempted() for _ in range(2)] == [3, 5]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
