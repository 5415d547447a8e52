"""Every process that a command starts ignores modules in the current folder."""

import os
import subprocess
import sys
import time

import pytest

from ckdist.python_words import code_words, module_words
from tests.support.launcher import one_host
from tests.support.ports import free_port

pytestmark = pytest.mark.cold

PLANTED = (
    "uvicorn",
    "msgpack",
    "msgspec",
    "zmq",
    "starlette",
    "tokenizers",
    "jinja2",
    "numpy",
    "cffi",
    "json",
    "psutil",
)
COMMANDS = {
    "generate": ["generate", "-p", "def", "-n", "2", "--temp", "0"],
    "two ranks": ["generate", "-tp", "2", "-t", "1", "-p", "def", "-n", "2", "--temp", "0"],
    "agent": [
        "launch",
        "--hosts",
        "here:2",
        "--agent",
        "env HOST={host}",
        "ckdist",
        "generate",
        "-p",
        "def",
        "-n",
        "2",
    ],
    "bench": ["bench", "-p", "8", "-n", "2", "-r", "1"],
    "perplexity": ["perplexity", "text.txt"],
    "doctor": ["doctor"],
    "train": ["train", "train.toml"],
}
TRAIN = """
train_file = ["text.txt"]
output_dir = "out"
max_steps = 1
per_device_train_batch_size = 1
max_length = 32
[model_config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
"""


@pytest.fixture
def hostile_folder(tmp_path):
    """A folder whose modules say so in the file `ran` when they are imported."""
    folder = tmp_path / "model"
    (folder / "ckdist").mkdir(parents=True)
    for name in (*(f"{name}.py" for name in PLANTED), "ckdist/__init__.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(7)\n")
    (folder / "text.txt").write_text("def main():\n    return 1\n" * 100)
    (folder / "train.toml").write_text(TRAIN)
    return folder


@pytest.mark.parametrize("safe", [False, *([True] if sys.version_info >= (3, 11) else [])])
def test_python_starts_without_the_current_folder(safe, hostile_folder):
    for words in (code_words("import json, ckdist", safe=safe), module_words("json.tool", "--help", safe=safe)):
        done = subprocess.run(words, cwd=hostile_folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert not (hostile_folder / "ran").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_module_of_the_current_folder_is_run(name, hostile_folder):
    done = ckdist(COMMANDS[name], hostile_folder)
    assert done.returncode in (0, 2), done.stderr
    assert not (hostile_folder / "ran").exists(), (hostile_folder / "ran").read_text()
    assert "Traceback" not in done.stderr


def test_a_server_runs_no_module_of_the_current_folder(hostile_folder):
    words = [f"{os.path.dirname(sys.executable)}/ckdist", "serve", "--port", str(free_port()), "-t", "1"]
    server = subprocess.Popen(words, cwd=hostile_folder, env=one_host(), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert "memory per rank" in "".join(server.stdout.readline() for _ in range(2))
        assert any("serving" in server.stdout.readline() for _ in range(5))
        time.sleep(0.5)  # text workers have been forked by now
        assert not (hostile_folder / "ran").exists(), (hostile_folder / "ran").read_text()
    finally:
        server.terminate()
        server.wait(30)


def ckdist(words, folder):
    """The command's result, as its console script runs it in `folder`."""
    program = f"{os.path.dirname(sys.executable)}/ckdist"
    return subprocess.run(
        [program, *words], cwd=folder, env=one_host(), capture_output=True, text=True, timeout=120, check=False
    )
