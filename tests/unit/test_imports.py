"""Each process of a server imports only the modules that it uses."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "rooms"),
    [
        (
            "ckdist.cli.serve",  # a rank other than 0
            (
                "ckdist.serve ckdist.tokens ckdist.engine.engine ckdist.weights.gguf ckdist.program.ops.experts "
                "ckdist.comm.bootstrap.handshake ckdist.weights.copies ckdist.weights.adapter"
            ),
        ),
        (
            "ckdist.cli.serve_rank_0",
            "ckdist.serve.server ckdist.train ckdist.tokens.chat_template ckdist.hub.remote_file",
        ),
        (
            "ckdist.serve.server",
            "ckdist.engine.engine ckdist.native ckdist.models numpy tokenizers jinja2 ckdist.serve.requests.task",
        ),
        ("ckdist.tokens.zygote, ckdist.serve.requests.task", "ckdist.native ckdist.models ckdist.serve.server numpy"),
    ],
)
def test_a_process_imports_none_of(modules, rooms):
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(rooms.split()) & set(loaded)


START = """
import sys, pathlib, ckdist.cli.main, ckdist.cli.serve_rank_0 as rank_0
from ckdist.comm.world import SingleWorld
from ckdist.config.serve_config import ServeConfig
model = rank_0.load_model(ServeConfig(threads=1), SingleWorld(), embeddings=True)
rank_0.make_engine(model)[0].grammars.prepare()
rank_0.RankReports(model), rank_0.model_facts(ServeConfig(), model), rank_0.logged_lines("", ServeConfig(), model)
files = [m.__file__ for name, m in sys.modules.items() if f"{name}.".startswith("ckdist.")]
print(sum(len(pathlib.Path(file).read_text().splitlines()) for file in files))
"""


def test_a_first_start_imports_at_most_20_000_lines(tmp_path):
    """Of rank 0 of `ckdist serve`, which tries the tokenizer: see docs/how/loading.md."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True, env=env)
    assert 10_000 < int(done.stdout) <= 20_000
