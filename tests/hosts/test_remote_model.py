"""A model at a URL over two hosts: each fetches what its rank holds, and the answers are a local file's."""

import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.checkpoints import write_model
from tests.support.hosts import Hosts, Output, why_not
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
PORT = 8080
PROGRAM = """
import os, socket, sys
os.environ["CKDIST_MODELS"] = os.path.join(sys.argv.pop(1), socket.gethostname())
from ckdist.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("flags, most", [(["-pp", "2"], 0.6), ([], 0.8)])
def test_a_host_fetches_its_part(tmp_path, flags, most):
    """Two stages: half of the layers. Tensors: half of the rows, and all of the matrices that columns shard."""
    model, stores = tmp_path / "model", tmp_path / "stores"
    model.mkdir()
    write_model(model, CONFIG, dtype=np.float16)
    size = (model / "model.safetensors").stat().st_size
    with Hosts() as hosts:
        words = [str(ROOT / "tests/support/programs/range_server.py"), hosts.addresses[0], str(PORT), str(model)]
        server = subprocess.Popen(hosts.inside(0, sys.executable, *words), stdin=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            url = f"http://{hosts.addresses[0]}:{PORT}/#unencrypted"
            words = ["-c", PROGRAM, str(stores), "bench", "-m", url, "-p", "4", "-n", "2", "-r", "1", "-t", "1", *flags]
            output = Output(*hosts.torchrun(1, *words))
            assert output.wait(90) == [0, 0], output.text()
        finally:
            server.kill()
            server.wait()
        for name in hosts.namespaces:
            (file,) = (stores / name).glob("remote/*/model.safetensors")
            assert file.stat().st_size == size
            assert 0.3 * size < 512 * file.stat().st_blocks < most * size
