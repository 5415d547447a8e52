"""What lies in launch/: scripts that a shell reads, manifests that kustomize renders, units that systemd reads."""

import dataclasses
import json
import shutil
import socket
import subprocess

import httpx
import pytest

from ckdist.cli.arguments import parse_arguments
from ckdist.cli.server_start import open_listeners
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve.addresses import listen, url_of
from ckdist.serve.notify import notify
from tests.support.paths import ROOT
from tests.support.served import serving, wait_for

LAUNCH = ROOT / "launch"
SCRIPTS = [p for p in LAUNCH.rglob("*") if p.is_file() and p.read_bytes()[:2] == b"#!"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(LAUNCH)))
def test_a_shell_reads_it(path):
    shell = path.read_text().splitlines()[0].removeprefix("#!")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert path.stat().st_mode & 0o111, f"chmod +x {path}"


def settings_of(words: list[str]) -> ServeConfig:
    """The settings of a command `serve …`."""
    assert words[0] == "serve"
    return parse_arguments(ServeConfig, words[1:], "ckdist serve")


@pytest.fixture(scope="module")
def manifests():
    """The rendered manifests by kind and name."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(LAUNCH / "kubernetes")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(done.stdout)}


def test_the_manifests(manifests):
    """Every pod has the image, the script, the secret and its probes; a leader and its workers are alike."""
    found = manifests
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
    config = settings_of(one["args"])
    drain = config.drain_timeout + int(one["lifecycle"]["preStop"]["exec"]["command"][1])
    assert drain < leader["terminationGracePeriodSeconds"]
    policy = found["NetworkPolicy", "ckdist"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert all("ipBlock" not in peer for rule in policy["egress"] for peer in rule["to"]), "within the cluster alone"


def test_probes_of_the_manifests_pass_though_the_server_asks_for_a_key(manifests):
    """The kubelet has no key: a probe that gets 401 makes the group again for ever."""
    spec = manifests["LeaderWorkerSet", "ckdist"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    (one,) = spec["containers"]
    config = settings_of(one["args"])
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert config.api_key_file and not config.no_auth
    assert (config.port, config.metrics_port) == (ports["http"], ports["metrics"])
    probes = {name: one[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    with listen("127.0.0.1", 0) as metrics, serving(api_key="k", metrics=metrics) as (engine, http):
        get = lambda probe: httpx.get(f"{http.url}{probe['path']}").status_code
        assert {name: get(probe) for name, probe in probes.items()} == dict.fromkeys(probes, 200)
        assert httpx.get(f"{url_of(metrics)}/metrics").status_code == 200
        engine.state = "loading"
        wait_for(lambda: get(probes["readiness"]) == get(probes["startup"]) == 503)
        assert get(probes["liveness"]) == 200


def test_recipes_that_listen_on_every_address_ask_for_a_key():
    """The image has no key of its own, so it does not start without one; the others name a file of keys."""
    for path in LAUNCH.rglob("*"):
        if path.is_file() and path.name != "Dockerfile" and "0.0.0.0" in (text := path.read_text()):
            assert "--api-key-file" in text and "--no-auth" not in text, path
    command = next(line for line in (LAUNCH / "container/Dockerfile").read_text().splitlines() if line[:4] == "CMD ")
    config = settings_of(json.loads(command[4:]))
    with pytest.raises(ConfigError, match="--no-auth serves without one"):
        open_listeners(dataclasses.replace(config, port=0))


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
