"""Weights in two states: the same logits bits wherever the repacker stands, one line when a file changes under
it, and what it refuses.
"""

import contextlib
import functools
import gc
import os
import shutil
import subprocess
import time

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.placement_map import placement_map
from ckdist.errors import CapacityError, ConfigError, ModelFileError
from ckdist.native import lib
from ckdist.weights.loader import ShardLoader
from ckdist.weights.tensor_source import TensorSource
from tests.support.checkpoints import WEIGHT, checkpoint_of, write_model
from tests.support.distinct_families import distinct_families
from tests.support.launcher import mpirun, one_host
from tests.support.paths import GOLDEN, ROOT
from tests.support.thread_ranks import run_threads
from tests.support.two_states import BEFORE, LARGE, TYPES, loaded, logits, situations


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A random model whose matrices have several slices, the last of them not whole, on every rank."""
    folder = tmp_path_factory.mktemp("large")
    write_model(folder, LARGE, dtype=np.float32)
    return folder


@functools.cache
def expected(path, ranks):
    return run_threads(ranks, lambda world: logits(world, path, BEFORE))[0][0]


def assert_same(path, ranks, until, threads=1, settled=True):
    results = run_threads(ranks, lambda world: logits(world, path, until, threads, settled))
    for a, b in zip(expected(path, ranks), results[0][0], strict=True):
        np.testing.assert_array_equal(a, b)
    return results


@pytest.mark.parametrize("path", TYPES, ids=lambda path: path.stem)
def test_every_type_has_the_same_bits(path):
    for ranks, until in ((2, 0.37), (1, 0.0))[: 1 + TYPES.index(path) % 2]:
        for _, before, after in assert_same(path, ranks, until):
            assert not after.finished and 0 <= before.fraction <= after.fraction <= until
            assert until == 0 or before.fraction > 0


@pytest.mark.parametrize("folder", distinct_families(), ids=lambda folder: folder.name)
def test_every_family_has_the_same_bits(folder):
    """Each in one state; `test_slices_of_large_matrices` has all states."""
    assert_same(folder, *((1, 0.0), (2, 0.37), (1, 1.0))[distinct_families().index(folder) % 3])


@pytest.mark.parametrize("ranks, threads", [(1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("until", [0.0, 0.37, 1.0])
def test_slices_of_large_matrices(large, ranks, threads, until):
    for settled in (True, False):
        for _, before, after in assert_same(large, ranks, until, threads, settled):
            if until < 1:
                # the last slice of a matrix counts as a whole one
                assert after.fraction <= (until and until + 0.05) and not after.finished
            else:
                assert after.finished and after.fraction == 1 and (before.finished or not settled)


def test_a_file_that_shrinks_ends_every_rank(tmp_path):
    """Mapped pages that are gone are a SIGBUS; what was left of the last page reads as zeros without one."""
    for size in (0, -5000, -1):
        path = tmp_path / "model.gguf"
        shutil.copy(GOLDEN / "gguf" / "BF16.gguf", path)
        length = path.stat().st_size
        size = size if size == 0 else length + size

        def rank(world):
            model = loaded(world, path, 0.0)
            if world.rank == 0:
                situations(model.executable)
                os.truncate(path, size)
            with pytest.raises(
                ModelFileError, match=f"model.gguf ends at byte {size} of the {length} it had .*start again"
            ):
                situations(model.executable) if world.rank == 0 else model.executable.work()
            with pytest.raises(ModelFileError):
                model.loader.check()
            model.executable.close()
            model.loader.close()

        run_threads(2, rank)


def test_a_file_that_is_written_to_is_noticed(tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(GOLDEN / "gguf" / "Q4_0.gguf", path)
    model = loaded(SingleWorld(), path, 0.0)
    situations(model.executable)
    with open(path, "r+b") as file:
        file.write(b"x")
    with pytest.raises(ModelFileError, match="was written to while it was loaded"):
        situations(model.executable)
    model.close()


def test_a_file_of_which_times_alone_change_is_the_same(tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(GOLDEN / "gguf" / "Q4_0.gguf", path)
    model = loaded(SingleWorld(), path, 0.0)
    before = situations(model.executable)
    path.touch()
    path.chmod(0o600)
    os.link(path, tmp_path / "link")
    path.rename(tmp_path / "moved")
    for a, b in zip(before, situations(model.executable), strict=True):
        np.testing.assert_array_equal(a, b)
    os.utime(tmp_path / "moved", (1, 1))
    model.loader.check()
    with open(tmp_path / "moved", "r+b") as file:  # replaced in place, by as many bytes
        file.write(b"x" * os.path.getsize(tmp_path / "moved"))
    with pytest.raises(ModelFileError, match="was written to while it was loaded"):
        model.loader.check()
    model.close()


def test_a_job_ends_by_one_line(tmp_path):
    """As a user meets it: under mpirun, in the middle of a text."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "ckdist" / "models" / "bundled", folder)
    words = [
        "tests/support/programs/stored_alone.py",
        "generate",
        "-m",
        str(folder),
        "-p",
        "def",
        "-n",
        "1000",
        "-c",
        "1024",
        "--ignore-eos",
        "-t",
        "1",
    ]
    process = subprocess.Popen(
        [*mpirun(2), *words], env=one_host(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    length = (folder / "model.safetensors").stat().st_size
    process.stdout.read(20)
    os.truncate(folder / "model.safetensors", 1000)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.startswith("ckdist:")]
    assert process.returncode == 2 and time.monotonic() - begin < 10
    assert len(lines) == 1 and lines[0].startswith(
        f"ckdist: {folder}/model.safetensors ends at byte 1000 of the {length}"
    ), errors


def test_memory_that_is_promised_is_taken(tmp_path):
    path, rows = tmp_path / "sparse", int(0.6 * lib.ckdist_available_memory() / 4096)
    with open(path, "wb") as file:
        file.truncate(rows * 4096)
    loaders = []
    for _ in range(2):
        loader = ShardLoader(checkpoint_of(tmp_path, TensorSource(WEIGHT, 0, (rows, 1024), path, 0)), 1)
        loader.add_matrix(WEIGHT, [(0, rows)])
        loaders.append(loader)
    loaders[0].open()
    with pytest.raises(CapacityError, match=r"the weights need .* GB of memory, and .* GB are available"):
        loaders[1].open()
    del loaders[0]
    gc.collect()  # handles and loaders know each other
    loaders[-1].open()


def test_what_cannot_be_is_refused(caplog):
    with pytest.raises(
        ConfigError, match="--repack threads serves weights as they are stored, and --quantize q8_0 changes them"
    ):
        EngineConfig(repack="threads", quantize="q8_0")
    with pytest.raises(ConfigError, match="one of auto, threads, off"):
        EngineConfig(repack="dsa")
    caplog.set_level("DEBUG")
    model = load_model(
        EngineConfig(model=str(GOLDEN / "llama3"), threads=1, ctx_size=64, quantize="q8_0"), SingleWorld()
    )
    assert "--quantize changes the weights, so all of them are packed before anything runs" in caplog.text
    model.close()


def test_held_it_stands_still(tmp_path):
    """While a layer is measured; what was begun is ended first."""
    wide = 200_000  # 230 MB take a while to pack
    shapes = {"gate_proj": (wide, 96), "up_proj": (wide, 96), "down_proj": (96, wide)}
    zeros = {f"model.layers.0.mlp.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    config = LARGE | {"num_hidden_layers": 1, "intermediate_size": wide}
    write_model(tmp_path, config, drop=zeros, **zeros)

    def fill(loader):
        loader.repack()
        stack.enter_context(loader.held())

    with contextlib.ExitStack() as stack:
        model = load_model(
            EngineConfig(model=str(tmp_path), threads=1, ctx_size=96, repack="threads"), SingleWorld(), fill=fill
        )

        def stands_still():
            before = model.loader.filled.ready
            time.sleep(0.2)
            return model.loader.filled.ready == before

        assert any(stands_still() for _ in range(20)) and model.loader.filled.ready < model.loader.filled.bytes / 2
    model.loader.wait()
    assert model.loader.filled.finished
    model.close()


def test_what_is_packed_is_told(caplog):
    """With -v, once: by rank 0, when both ranks are through."""
    caplog.set_level("DEBUG")
    config = EngineConfig(model=str(TYPES[0]), threads=1, ctx_size=96, prefill="token", repack="threads")

    def rank(world):
        model = load_model(config, world)
        model.loader.wait()
        stats = model.loader.filled.stats()
        assert (
            stats["weights_packed_ratio"] == 1 and stats["weights_packed_bytes"] == stats["weights_bytes"] > 1_000_000
        )
        model.executable.close()
        model.loader.close()

    run_threads(2, rank)
    (line,) = [record for record in caplog.records if "weights are packed" in record.message]
    assert line.levelname == "DEBUG" and "weights are packed: 0.00 GB in" in line.message
    model = loaded(SingleWorld(), TYPES[0], 0.0)
    assert "\n0 % of the weights are packed so far; untouched pages are not in the map" in placement_map(model)
    model.close()
