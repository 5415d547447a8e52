"""What lies in launch/: scripts that a shell reads, manifests that kustomize renders, units that systemd reads."""

import shutil
import socket
import subprocess

import pytest

from ckdist.serve.notify import notify
from tests.support.paths import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = [p for p in LAUNCH.rglob("*") if p.is_file() and p.read_bytes()[:2] == b"#!"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(LAUNCH)))
def test_a_shell_reads_it(path):
    shell = path.read_text().splitlines()[0].removeprefix("#!")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert path.stat().st_mode & 0o111, f"chmod +x {path}"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_the_manifests():
    """Rendered, every pod has the image, the script, the secret and its probes; a leader and its workers are alike."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(LAUNCH / "kubernetes")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(done.stdout)}
    group = found["LeaderWorkerSet", "ckdist"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[f"{kind}Template"]["spec"] for kind in ("leader", "worker"))
    (one,), (other,) = leader["containers"], worker["containers"]
    assert one["image"] == other["image"] == "registry.example/ckdist:0.1.0"
    assert set(one) - set(other) == {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert all(one[name] == value for name, value in other.items()) and leader["volumes"] == worker["volumes"]
    assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in leader["volumes"]}
    assert found["ConfigMap", "ckdist-rank"]["data"]["rank.sh"] == (LAUNCH / "kubernetes/rank.sh").read_text()
    port = found["Service", "ckdist"]["spec"]["ports"][0]["targetPort"]
    assert port in {named["name"] for named in one["ports"]}
    drain = int(one["args"][one["args"].index("--drain-timeout") + 1]) + int(
        one["lifecycle"]["preStop"]["exec"]["command"][1]
    )
    assert drain < leader["terminationGracePeriodSeconds"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["ckdist-serve.service", "ckdist-train@.service"])
def test_systemd_reads_the_unit(name, tmp_path):
    text = (LAUNCH / "systemd" / name).read_text().replace("/opt/ckdist/bin/ckdist", "/bin/true")
    unit = tmp_path / name.replace("@", "@x")
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert unit.name not in done.stderr, done.stderr


def test_systemd_is_told(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1", "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"
        monkeypatch.setenv("NOTIFY_SOCKET", "@ckdist-nobody-listens")
        notify("READY=1")
        monkeypatch.delenv("NOTIFY_SOCKET")
        notify("READY=1")


def test_the_image_has_what_the_build_reads():
    """The Dockerfile's list of files lets through what CMake and pip read."""
    kept = {
        line[1:] for line in (LAUNCH / "container/Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert {"pyproject.toml", "CMakeLists.txt", "constraints.txt", "ckdist", "README.md", "LICENSE", "NOTICE"} <= kept
    assert all((ROOT / name).exists() for name in kept)
