"""RDMA devices read from recorded trees, the choice among their addresses, and refusals; what moves bytes is in
tests/vm.
"""

import pathlib
import shutil
import subprocess

import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.comm.transports import verbs
from ckdist.errors import CkdistError, ConfigError
from tests.support.thread_ranks import run_threads

NATIVE = pathlib.Path(verbs.__file__).parent.parent / "native"


def add_port(root, device, gids, state="4: ACTIVE", link="Ethernet", node=0):
    """gids: {index: (gid, type, interface)}; one more entry is empty, as most are."""
    port = root / "sys/class/infiniband" / device / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(link + "\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (root / "sys/class/infiniband" / device / "device").mkdir()
    (root / "sys/class/infiniband" / device / "device/numa_node").write_text(f"{node}\n")
    (port / "gids/250").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (port / "gids/251").write_text("fe80:0000:0000:0000:0000:0000:0000:0000\n")  # a prefix alone
    for index, (gid, kind, interface) in gids.items():
        (port / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
            (port / "gid_attrs/ndevs" / str(index)).write_text(interface + "\n")


def ipv4(a, b, c, d):
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


LINK_LOCAL = "fe80:0000:0000:0000:ba59:9fff:fe01:0203"


@pytest.fixture
def roce(tmp_path):
    """Two ports as a ConnectX driver lists them: every address as version 1 and as version 2."""
    for device, interface, node, last in (("mlx5_0", "ens1f0", 0, 1), ("mlx5_1", "ens1f1", 1, 2)):
        entries = [
            (LINK_LOCAL, "IB/RoCE v1"),
            (LINK_LOCAL, "RoCE v2"),
            (ipv4(10, 1, 0, last), "IB/RoCE v1"),
            (ipv4(10, 1, 0, last), "RoCE v2"),
        ]
        add_port(tmp_path, device, {i: (gid, kind, interface) for i, (gid, kind) in enumerate(entries)}, node=node)
    return tmp_path


def test_ports_are_read(roce):
    first, second = verbs.devices(roce)
    assert (first.device, first.port, first.state, first.node) == ("mlx5_0", 1, "ACTIVE", 0)
    assert [(g.index, g.version, g.address, g.interface) for g in second.gids] == [
        (0, "RoCE v1", "fe80::ba59:9fff:fe01:203", "ens1f1"),
        (1, "RoCE v2", "fe80::ba59:9fff:fe01:203", "ens1f1"),
        (2, "RoCE v1", "10.1.0.2", "ens1f1"),
        (3, "RoCE v2", "10.1.0.2", "ens1f1"),
    ]
    assert verbs.devices("/nowhere") == ()


@pytest.mark.parametrize(
    "interface, device, address",
    [
        (None, "mlx5_0", "10.1.0.1"),
        ("ens1f1", "mlx5_1", "10.1.0.2"),
        ("10.1.0.2", "mlx5_1", "10.1.0.2"),
        ("mlx5_1", "mlx5_1", "10.1.0.2"),
    ],
)
def test_version_2_and_ipv4_are_preferred(roce, interface, device, address):
    choice = verbs.choose(verbs.devices(roce), interface)
    assert (choice.device, choice.gid.index, choice.gid.version, choice.gid.address) == (device, 3, "RoCE v2", address)


def test_the_device_near_the_rank_is_preferred(roce):
    assert [verbs.choose(verbs.devices(roce), numa_node=node).device for node in (0, 1)] == ["mlx5_0", "mlx5_1"]


def test_infiniband_has_no_versions(tmp_path):
    add_port(tmp_path, "ib0", {0: ("fe80:0000:0000:0000:0002:c903:0001:0203", "", "")}, link="InfiniBand")
    assert verbs.choose(verbs.devices(tmp_path)).gid.version == "InfiniBand"


def test_what_there_is_stands_in_the_refusal(roce, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^no active RDMA port has the address or interface 10.9.9.9; there is mlx5_0 \(active: 10.1.0.1, fe80",
    ):
        verbs.choose(verbs.devices(roce), "10.9.9.9")
    add_port(tmp_path / "other", "mlx5_0", {3: (ipv4(10, 1, 0, 1), "RoCE v2", "ens1f0")}, state="1: DOWN")
    with pytest.raises(ConfigError, match=r"^no RDMA port is active; there is mlx5_0 \(down: 10.1.0.1\)$"):
        verbs.choose(verbs.devices(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"^this machine has no RDMA device$"):
        verbs.choose(verbs.devices("/nowhere"))


def test_a_device_that_is_not_there_is_refused(roce):
    """Whether the library, the headers at build time or the device is missing: one line, no crash."""
    choice = verbs.Choice("no_such_device", 1, verbs.Gid(0, "RoCE v2", "10.0.0.1", "eth0"))
    with pytest.raises(CkdistError) as caught:
        verbs.VerbsTransport(choice, 0, 2, 5.0)
    assert "\n" not in str(caught.value)
    with pytest.raises(CkdistError):
        verbs.VerbsTransport(choice, 2, 2, 5.0)


@pytest.mark.skipif(bool(verbs.devices()), reason="there is an RDMA device")
def test_a_world_without_devices_is_refused_on_all_ranks():
    def body(world):
        with pytest.raises(ConfigError, match=r"^--transport verbs does not work on rank 0 [(]here[)]: ") as caught:
            open_communicator(world, "verbs", timeout=5)
        return str(caught.value)

    first, second = run_threads(2, body)
    assert first == second and "\n" not in first
    assert not verbs.verbs_works()[0]


def test_it_builds_without_the_headers():
    compiler = shutil.which("c++") or pytest.skip("no compiler")
    for source in sorted(NATIVE.glob("comm/transports/verbs*.cpp")):
        command = [
            compiler,
            "-std=c++17",
            "-fsyntax-only",
            "-DCKDIST_WITHOUT_VERBS",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{NATIVE}",
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
