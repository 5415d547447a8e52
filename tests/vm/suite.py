"""What needs RDMA devices or two NUMA nodes, in a virtual machine that has them: `make test-vm` runs it.

One boot for all tests, one command at a time. Nothing here measures speed: the machine is emulated.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.launcher import environment
from tests.support.paths import ROOT
from tests.vm.machine import BOOT_SECONDS, COMMAND_SECONDS, Machine, prepare

pytestmark = pytest.mark.timeout(BOOT_SECONDS + 3 * COMMAND_SECONDS)  # the machine has limits of its own
IDS = ",".join(map(str, np.load(ROOT / "tests/golden/llama3/ids.npy").ravel()[:64]))
PERPLEXITY = f"python -m ckdist.cli.main perplexity --model tests/golden/llama3 --token-ids {IDS} --threads 1 --json"


@pytest.fixture(scope="module")
def machine():
    missing = prepare()
    if missing:
        pytest.skip(missing)
    with Machine() as machine:
        machine.run("tests/vm/two_devices.sh")
        yield machine


def last_json(text: str):
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def test_devices_are_found(machine):
    done = machine.run(
        """python -c 'from ckdist.comm.transports.verbs import verbs_works as works"""
        """; [print(works(i)) for i in (None, "wire1", "10.9.0.3")]'"""
    )
    first, second, third = done.stdout.splitlines()
    assert first == "(True, 'rxe0 port 1, GID 1 (RoCE v2, 10.9.0.1)')"
    assert second == "(True, 'rxe1 port 1, GID 1 (RoCE v2, 10.9.0.2)')"
    assert third.startswith(
        "(False, 'no active RDMA port has the address or interface 10.9.0.3; there is rxe0 (active: 10.9.0.1"
    )


@pytest.mark.parametrize("case", ["messages", "order", "windows"])
def test_transport_between_two_devices(machine, case):
    machine.run(f"python tests/vm/guest_rank.py {case}")


def test_transport_meets_an_independent_peer(machine):
    assert "the stranger is content" in machine.run("python tests/vm/guest_rank.py stranger").stdout


def test_who_is_gone_is_named(machine):
    machine.run("python tests/vm/guest_rank.py stalled,goodbye,port_down,killed")


@pytest.mark.parametrize("case", ["two", "three", "four", "hybrid"])
def test_every_operation_of_a_communicator(machine, case):
    """The checks that all transports pass, with the bits of tcp."""
    machine.run(f"python tests/vm/guest_communicator.py {case}")


def test_communicators_large_messages(machine):
    machine.run("python tests/vm/guest_communicator.py large pinned")


def test_calls_that_differ_are_told(machine):
    machine.run("python tests/vm/guest_communicator.py wrong_calls")


def test_a_slow_link_is_waited_for(machine):
    machine.run("python tests/vm/guest_communicator.py slow")


def test_a_communicator_whose_port_or_peer_goes(machine):
    machine.run("python tests/vm/guest_communicator.py refused wire_down lost")


def test_doctor_opens_the_port_and_compares_the_nodes(machine):
    done = machine.run("python tests/vm/guest_doctor.py")
    assert "transport   verbs" in done.stdout and "rxe0 port 1, GID 1 (RoCE v2, 10.9.0.1)" in done.stdout, done.stdout


def test_pages_lie_where_they_are_bound(machine):
    assert last_json(machine.run("python tests/vm/guest_pages.py").stdout)["distance"] == ["10", "21"]


@pytest.mark.parametrize("reserved", [0, 64])
def test_arenas_lie_where_ranks_are_placed(machine, reserved):
    """The tests that need two nodes, in plain and in reserved huge pages."""
    try:
        done = machine.run(
            f"sysctl -qw vm.nr_hugepages={reserved} && python -m pytest -q -p no:cacheprovider "
            f"tests/unit/test_topology.py -k 'TestNuma or TestPages'"
        )
    finally:
        machine.run("sysctl -qw vm.nr_hugepages=0")
    assert ("1 skipped" in done.stdout) == (reserved == 0) and "failed" not in done.stdout, done.stdout


@pytest.mark.parametrize("way", ["off", "threads"])
@pytest.mark.parametrize("reserved, huge", [(0, "transparent"), (64, "100 % reserved")])
def test_the_map_tells_nodes_and_huge_pages(machine, way, reserved, huge):
    """Two ranks that mpirun placed, each on its node, with all its pages there, whether weights were packed before
    the first step or behind it.
    """
    try:
        done = machine.run(
            f"sysctl -qw vm.nr_hugepages={reserved} && mpirun -n 2 --map-by numa --bind-to numa python "
            f"tests/vm/guest_map.py {way}"
        )
    finally:
        machine.run("sysctl -qw vm.nr_hugepages=0")
    rows = [line for line in done.stdout.splitlines() if line[:1] in ("0", "1")]
    assert [row.split()[2] for row in rows] == ["0", "1"] and all(
        "128 / 0" in row and row.endswith(huge) for row in rows
    ), done.stdout


@pytest.mark.parametrize(
    "launch, refused",
    [("taskset -c 1,2 mpirun --bind-to none", ""), ("mpirun --map-by numa --bind-to numa", "refused")],
    ids=["a cpuset that splits nodes", "binding refused"],
)
def test_weights_are_packed_behind_steps_on_lesser_machines(machine, launch, refused):
    token = lambda done: [line for line in done.stdout.splitlines() if line.startswith("token")]
    whole = token(machine.run("python tests/vm/guest_map.py off"))
    done = machine.run(f"{launch} -n 2 python tests/vm/guest_map.py threads {refused}")
    rows = [line for line in done.stdout.splitlines() if line[:1] in ("0", "1")]
    assert len(whole) == 1 and token(done) == whole and [row.split()[2] for row in rows] == ["0", "1"], done.stdout
    assert all(int(row.split(" / ")[1].split()[0]) == 0 for row in rows), done.stdout  # first touched where it belongs
    assert done.stdout.count("the kernel refuses to bind memory") == bool(refused), done.stdout


def test_one_rank_over_both_nodes_has_half_of_its_pages_on_each(machine):
    done = machine.run("python tests/vm/guest_map.py off")
    row = next(line for line in done.stdout.splitlines() if line.startswith("0 "))
    assert row.split()[2] == "0-1" and "128 / 0" in row and row.endswith("transparent"), done.stdout
    assert "weights 32 32" in done.stdout and "cache 32 32" in done.stdout, done.stdout


def test_ranks_are_bound_to_their_nodes(machine):
    done = machine.run("mpirun -n 2 --map-by numa --bind-to numa python tests/vm/guest_mpi.py")
    assert last_json(done.stdout)["cpus"] == [[0, 1], [2, 3]]


def test_mpi_over_roce(machine):
    done = machine.run(
        "mpirun -n 2 --map-by numa --bind-to numa --mca pml ucx -x UCX_TLS=ib,self -x UCX_NET_DEVICES=rxe0:1 "
        "python tests/vm/guest_mpi.py"
    )
    assert last_json(done.stdout)["packets"] >= 200, done.stdout  # 800 kB in packets of 4 KiB


def test_perplexity_is_the_hosts(machine):
    """The same numbers to the last bit, from kernels of the guest's ISA, with each rank on a node of its own."""
    level = machine.run("python -c 'from ckdist import native; print(native.isa())'").stdout.split()[-1]
    here = subprocess.run(
        ["mpirun", "-n", "2", "--oversubscribe", sys.executable, *PERPLEXITY.split()[1:]],
        env={**environment(), "CKDIST_ISA": level},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert here.returncode == 0, here.stderr
    for transport in ("auto", "verbs"):
        there = machine.run(f"mpirun -n 2 --map-by numa --bind-to numa {PERPLEXITY} --transport {transport}")
        assert last_json(there.stdout) == last_json(here.stdout), transport
