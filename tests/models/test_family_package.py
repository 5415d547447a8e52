"""A family of another package, by the entry point `ckdist.families`: a package made here, for Python to find."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from ckdist.errors import ArchitectureError
from ckdist.models import registry
from tests.support.paths import GOLDEN, ROOT

SOURCE = """
from dataclasses import replace
from ckdist.models.families import llama

FAMILY = replace(llama.FAMILY, name="echo", architectures=("EchoForCausalLM",), model_types=("echo",), gguf="echo",
                 from_config=lambda f, outer: replace(llama.config(f, outer), family="echo"))
WRONG = 7
TAKEN = replace(llama.FAMILY, name="llama")
"""
SCRIPT = """
import sys
import numpy as np
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
model = load_model(EngineConfig(model=sys.argv[1], threads=1, cache_type_k="f32", cache_type_v="f32"), SingleWorld())
np.save(sys.argv[2], SingleSequence(model.executable).feed(np.load(sys.argv[3])))
print(model.spec.family)
"""


def package(folder, value: str) -> dict[str, str]:
    """A package with one entry point; the environment in which Python finds it."""
    (folder / "echo_family.py").write_text(SOURCE)
    info = folder / "echo_family-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckdist.families]\necho = {value}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def model(folder) -> None:
    """The golden Llama under the other family's name."""
    config = json.loads((GOLDEN / "llama2" / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["EchoForCausalLM"], "model_type": "echo"})
    )
    (folder / "model.safetensors").symlink_to(GOLDEN / "llama2" / "model.safetensors")


def test_a_family_of_another_package_runs(tmp_path):
    environment = package(tmp_path, "echo_family:FAMILY")
    model(tmp_path)
    arguments = [str(tmp_path), str(tmp_path / "logits.npy"), str(GOLDEN / "llama2" / "ids.npy")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "echo\n", done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), np.load(GOLDEN / "llama2" / "logits.npy"), atol=2e-4)


def test_entry_points_that_are_no_families_are_one_line(tmp_path, monkeypatch):
    model(tmp_path)
    command = [sys.executable, "-m", "ckdist.cli.main", "perplexity", "--token-ids", "4,5", "-m", str(tmp_path)]
    environment = package(tmp_path, "echo_family:WRONG")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "entry point echo" in done.stderr and "is int; it must name a Family with a name" in done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    for value, message in [
        ("echo_family:TAKEN", "there is a family 'llama' already; give it another name"),
        ("echo_family:ABSENT", "cannot be loaded: AttributeError"),
    ]:
        package(tmp_path, value)
        with pytest.raises(ArchitectureError, match=f"^entry point echo = {value} .*{message}") as error:
            registry.other_families.__wrapped__()
        assert "\n" not in str(error.value)
    del sys.modules["echo_family"]
