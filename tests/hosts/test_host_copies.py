"""Two hosts whose copies of a model differ in one byte, which the sample at start does not see."""

import pathlib
import shutil

import numpy as np
import pytest

from ckdist.engine.load_model import BUNDLED
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.model_files import BLOCK, model_files
from tests.support.hosts import Hosts, start, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")


@pytest.mark.parametrize("stages", ["1", "2"])
def test_no_server_answers_from_copies_that_differ(tmp_path, stages):
    model, other = (pathlib.Path(shutil.copytree(BUNDLED, tmp_path / name)) for name in ("model", "other"))
    files = model_files(open_checkpoint(model))
    blocks = files[0].sample(len(files))
    byte = int(blocks[np.flatnonzero(np.diff(blocks) > 3 * BLOCK)[-1]]) + 2 * BLOCK + 9
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 128]))
    words = ["-m", "ckdist.cli.main", "serve", "-m", str(model), "--port", "0", "-t", "1", "-c", "64", "-pp", stages]
    with Hosts() as hosts:
        hosts.mounts[1][model] = other
        output = start(hosts, "torchrun", 1, *words)
        assert output.wait(60) == [2, 2], output.text()
        a, b = hosts.namespaces
    assert "serving" not in output.text()
    told = [line for line in output.text().splitlines() if "differs" in line and "ckdist: rank 1 (" in line]
    tensor = files[0].tensor_at(byte)
    assert f"rank 1 ({b}): {model}/model.safetensors differs from that on rank 0 ({a}) at byte {byte}, " in told[0]
    assert f"in tensor {tensor}: copy the model again" in told[0]
