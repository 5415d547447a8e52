"""Each process of a server imports only the modules that it uses."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "rooms"),
    [
        (
            "ckdist.cli.serve",  # a rank other than 0
            "ckdist.serve ckdist.tokens ckdist.engine.engine ckdist.weights.adapter ckdist.program.ops.loss",
        ),
        ("ckdist.cli.serve_rank_0", "ckdist.serve.server ckdist.train ckdist.weights.adapter ckdist.hub.remote_file"),
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
