"""`ckdist doctor`: what it says of machines recorded and present, what it advises, and that it ends."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from ckdist.cli import capabilities as tried
from ckdist.cli.doctor import measure, remote_penalty, speed_lines, text_of
from ckdist.plan import node_speed
from ckdist.plan.node_speed import GEMM_TYPES, measurements, multiply_on, node_cpus
from ckdist.topology import read_machine, this_machine
from ckdist.topology.advice import advise
from tests.support.launcher import environment
from tests.support.paths import ROOT
from tests.support.trees.layouts import GIB, LAYOUTS, Layout, folder_in_memory, hybrid


@pytest.fixture
def tmp_path():
    with folder_in_memory() as folder:
        yield folder


SPEED = [
    {"what": "read", "node": 0, "memory": 0, "rate": 200e9},
    {"what": "gemm", "node": 0, "type": "BF16", "rate": 3e12},
]


def words(advice) -> str:
    return "\n".join(f"{one.finding}: {one.why} $ {one.command}" for one in advice)


class TestAdvice:
    def advice(self, tmp_path, layout=None, memlock=-1, **extra):
        layout = layout or Layout()
        layout = dataclasses.replace(
            layout, extra=layout.extra | {name.replace("__", "/"): text for name, text in extra.items()}
        )
        return words(advise(read_machine(layout.write(tmp_path), {}), tmp_path, memlock))

    def test_nothing_to_change(self, tmp_path):
        assert self.advice(tmp_path) == ""

    @pytest.mark.parametrize(
        "path, text, expected",
        [
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "echo madvise | sudo tee"),
            (
                "sys/kernel/mm/transparent_hugepage/defrag",
                "always defer madvise [never]",
                "transparent_hugepage/defrag",
            ),
            (
                "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor",
                "powersave",
                "cpupower frequency-set -g performance",
            ),
            ("proc/sys/vm/overcommit_memory", "2", "vm.overcommit_memory=0"),
            (
                "proc/meminfo",
                "MemTotal: 8000000 kB\nSwapTotal: 4000000 kB\nSwapFree: 2000000 kB",
                "1953 MiB are swapped out",
            ),
        ],
    )
    def test_settings(self, path, text, expected, tmp_path):
        assert expected in self.advice(tmp_path, Layout(extra={path: text}))

    def test_limits(self, tmp_path):
        extra = {
            "proc/self/cgroup": "0::/box",
            "sys/fs/cgroup/box/memory.max": str(8 * GIB),
            "sys/fs/cgroup/box/cpu.max": "250000 100000",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        }
        text = self.advice(tmp_path, Layout(extra=extra), memlock=8 << 20)
        assert "2.5 CPUs' worth of time to 4 cores" in text and "docker update --cpus 4" in text
        assert "limits memory to 8.0 of 64.0 GiB" in text
        assert "may lock 8192 KiB" in text and "memlock unlimited" in text

    def test_nodes(self, tmp_path):
        text = self.advice(tmp_path, LAYOUTS["SNC-2"][0], proc__sys__kernel__numa_balancing="1")
        assert (
            "SNC-2: memory is in 4 nodes" in text and "ckdist serve -tp 4" in text and "kernel.numa_balancing=0" in text
        )

    def test_cpus(self, tmp_path):
        text = self.advice(tmp_path, dataclasses.replace(LAYOUTS["offline cores"][0], allowed="0,4-12"))
        assert "CPUs 1-3,17,24 are switched off" in text and "5 of 8 cores of node 1 may be used" in text


class TestText:
    @pytest.mark.parametrize(
        "name, width", [("SNC-4", 80), ("memory node", 80), ("no nodes", 80), ("hybrid", 80), ("hybrid", 120)]
    )
    def test_is_readable(self, name, width, tmp_path):
        """Every line but a command fits, tables of many nodes within 120 columns."""
        machine = read_machine((hybrid() if name == "hybrid" else LAYOUTS[name][0]).write(tmp_path), {})
        found = [
            tried.Capability(
                "launcher", "torchrun-style", False, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"
            )
        ]
        text = text_of(machine, found, SPEED, advise(machine, tmp_path, -1), width)
        assert all(len(line) <= 120 for line in text.splitlines() if "$ " not in line), text
        for heading in ("Machine", "This process", "Placement", "Works here", "Measured", "To change"):
            assert f"\n{heading}" in text
        assert "3000" in text and "200.0" in text

    def test_pairs_of_nodes(self, tmp_path):
        machine = read_machine(LAYOUTS["two sockets"][0].write(tmp_path), {})
        rates = {(0, 0): 200e9, (1, 1): 180e9, (0, 1): 100e9, (1, 0): 120e9}
        lines = speed_lines(
            machine,
            [{"what": "read", "node": cpus, "memory": memory, "rate": rate} for (cpus, memory), rate in rates.items()],
        )
        assert [line.split() for line in lines if line.count("node ") == 2] == [
            ["node", "0", "node", "1", "100.0", "2.00", "times"],
            ["node", "1", "node", "0", "120.0", "1.50", "times"],
        ]
        assert lines[-1] == "  reading another node's memory is 1.75 times slower than reading one's own"

    def test_remote_penalty(self):
        reads = {(0, 0): 200.0, (1, 1): 180.0, (0, 1): 100.0, (1, 0): 120.0, (0, 2): 20.0}
        assert remote_penalty(reads) == pytest.approx((2.0 + 1.5) / 2), "the memory of node 2 has no CPUs beside it"
        assert remote_penalty({(0, 0): 1.0}) is None


class TestMeasuring:
    def test_products_are_counted(self):
        cpus = next(iter(node_cpus(this_machine()).values()))
        allowed = os.sched_getaffinity(0)
        assert all(multiply_on(cpus[:1], kind, 0.01) > 1e8 for kind in GEMM_TYPES)
        assert os.sched_getaffinity(0) == allowed, "only threads of its own are pinned"

    def test_no_time_no_measurement(self):
        assert list(measurements(this_machine(), -1.0)) == []

    @pytest.mark.parametrize("pass_seconds", [0.1, 20.0], ids=["quick products", "slow products"])
    def test_products_leave_time_for_reads_across_nodes(self, pass_seconds, monkeypatch, tmp_path):
        machine = read_machine(LAYOUTS["two sockets"][0].write(tmp_path), {})
        clock = [0.0]

        def spend(seconds: float) -> float:
            clock[0] += seconds
            return 1e9

        monkeypatch.setattr(node_speed.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(node_speed, "read_node", lambda *_: spend(0.2))
        product = lambda cpus, number, tokens, seconds, repeats=3: spend(repeats * max(seconds, pass_seconds))
        monkeypatch.setattr(node_speed, "product_rate", product)
        rows = list(measurements(machine, 3.0 if pass_seconds < 1 else 60.0))
        reads = [(row["node"], row["memory"]) for row in rows if row["what"] == "read"]
        assert reads == [(0, 0), (1, 1), (0, 1), (1, 0)]
        assert len(rows) - len(reads) == (6 if pass_seconds < 1 else 2)

    def test_is_ended(self):
        began = time.monotonic()
        measure(seconds=30.0, limit=0.3)
        assert time.monotonic() - began < 5


class TestTrying:
    def test_a_command_that_hangs(self):
        began = time.monotonic()
        code, text = tried.run_briefly(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.2)
        assert code == 124 and "no end within" in text and time.monotonic() - began < 5

    def test_a_command_that_is_not_there(self):
        assert tried.run_briefly(["/no/such/program"])[0] == 127

    def test_codes_and_output(self):
        assert tried.run_briefly(["sh", "-c", "echo said; exit 3"]) == (3, "said")

    def test_torchrun(self, monkeypatch, tmp_path):
        for name in tried.TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        assert not tried.torchrun()[0]
        monkeypatch.setenv("RANK", "1")
        assert tried.torchrun()[1] == "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"
        for name in tried.TORCHRUN[1:]:
            monkeypatch.setenv(name, "2")
        monkeypatch.delenv("CKDIST_JOB_SECRET_FILE", raising=False)
        works, about = tried.torchrun()
        assert not works and "CKDIST_JOB_SECRET_FILE" in about
        secret = tmp_path / "secret"
        secret.write_text("a secret of this job alone")
        secret.chmod(0o600)
        monkeypatch.setenv("CKDIST_JOB_SECRET_FILE", str(secret))
        assert tried.torchrun()[0]

    def test_what_is_broken_hides_nothing(self, monkeypatch):
        monkeypatch.setattr(tried.psutil, "net_if_stats", lambda: 1 / 0)
        rows = {row.name: row for row in tried.capabilities(this_machine())}
        assert rows["TCP"] == tried.Capability("transport", "TCP", False, "ZeroDivisionError: division by zero")
        assert rows["shared memory"].works and rows["baseline"].works

    def test_who_does_not_answer_is_left_behind(self, monkeypatch):
        monkeypatch.setattr(tried, "tcp", lambda: time.sleep(60))
        began = time.monotonic()
        rows = {row.name: row for row in tried.capabilities(this_machine(), 0.2)}
        assert rows["TCP"] == tried.Capability("transport", "TCP", False, "no answer within 0.2 s")
        assert rows["shared memory"].works and time.monotonic() - began < 5

    def test_kernels_and_transports(self):
        rows = {row.name: row for row in tried.kernels(this_machine())}
        assert rows["baseline"].works and sum(row.about.startswith("chosen: ") for row in rows.values()) == 1
        assert all(row.works or row.about.startswith(("this CPU lacks", "the kernel refuses")) for row in rows.values())
        assert tried.shared_memory()[0] and tried.tcp()[0]


class TestCommand:
    @pytest.mark.alone
    def test_json_within_ten_seconds_on_a_busy_machine(self):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
        try:
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "ckdist.cli.main", "doctor", "--json"],
                env=environment(),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
            )
            took = time.monotonic() - began
        finally:
            for process in busy:
                process.kill()
                process.wait()
        assert done.returncode == 0, done.stderr
        assert took < 10
        report = json.loads(done.stdout)
        assert {"machine", "capabilities", "speed", "advice", "remote_penalty"} <= report.keys()
        assert report["machine"]["nodes"]

    def test_only_rank_0_speaks(self):
        env = environment() | {"OMPI_COMM_WORLD_RANK": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "ckdist.cli.main", "doctor"],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, "")
