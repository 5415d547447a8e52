"""Ranks that would not compute the same model are refused in one line, which names the host and the difference."""

import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from ckdist.comm.agreement import agree_fields, flag_values, shown_apart
from ckdist.config.engine_config import EngineConfig
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError, ModelFileError
from ckdist.weights import whole_comparison
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.copies import compare_samples
from ckdist.weights.model_files import BLOCK, ModelFile, model_files
from ckdist.weights.whole_comparison import WholeComparison
from tests.support.launched import launch
from tests.support.mounts import mounted, why_no_mounts
from tests.support.thread_ranks import ThreadWorld, run_threads
from tests.support.tiny_training import toml

GENERATE = "ckdist generate -p def -n 4 --temp 0 -t 1 --repack off"
own_mounts = pytest.mark.skipif(bool(why_no_mounts()), reason=f"no mount namespaces here: {why_no_mounts()}")


def ranks(first: str, second: str, timeout: float = 60) -> subprocess.CompletedProcess:
    """Two ranks of this host with a command line each."""
    return launch(
        "-n", "2", "--no-prefix", "bash", "-c", f"[ $RANK = 1 ] && exec {second}; exec {first}", timeout=timeout
    )


def refusal(done: subprocess.CompletedProcess) -> str:
    """The one line of a job that is refused."""
    assert done.returncode == 2 and done.stdout == "", done.stderr
    first, last = done.stderr.splitlines()
    assert last == "ckdist: rank 0 of 2 ended with code 2"
    return first.removeprefix("ckdist: ")


@pytest.fixture
def copies(tmp_path) -> tuple[pathlib.Path, pathlib.Path]:
    """The bundled model twice."""
    return tuple(pathlib.Path(shutil.copytree(BUNDLED, tmp_path / name)) for name in ("model", "other"))


def flip(path: pathlib.Path, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))


def weights_of(folder: pathlib.Path) -> tuple[ModelFile, int]:
    files = model_files(open_checkpoint(folder))
    return next(file for file in files if file.tensors), len(files)


def byte_of(folder: pathlib.Path, sampled: bool) -> int:
    """A byte of a tensor that the sample has, or has not."""
    file, count = weights_of(folder)
    blocks = file.sample(count)
    if sampled:
        return int(blocks[-3]) + 7
    return int(blocks[np.flatnonzero(np.diff(blocks) > 3 * BLOCK)[-1]]) + 2 * BLOCK + 9


@own_mounts
@pytest.mark.parametrize("sampled", [True, False])
def test_one_other_byte_in_a_tensor_of_one_copy(copies, sampled):
    model, other = copies
    byte = byte_of(model, sampled)
    flip(other / "model.safetensors", byte)
    tensor = weights_of(model)[0].tensor_at(byte)
    command = f"{GENERATE} -m {model}"
    line = refusal(ranks(command, mounted({model: other}, command)))
    assert line.startswith("rank 1 (") and f"{model}/model.safetensors differs from that on rank 0 (" in line
    assert f"at byte {byte}, in tensor {tensor}: copy the model again" in line


@own_mounts
def test_other_values_of_an_adapter(copies, tmp_path):
    from tests.support.adapters import random_adapter

    for seed, name in enumerate(("a", "b")):
        random_adapter(tmp_path / name, copies[0], {"q_proj", "down_proj"}, seed)
    command = f"{GENERATE} -m {copies[0]} --lora {tmp_path}/a"
    line = refusal(ranks(command, mounted({tmp_path / "a": tmp_path / "b"}, command)))
    assert line.startswith("rank 1 (") and f"{tmp_path}/a/adapter_model.safetensors differs from that on rank 0" in line


@own_mounts
def test_a_training_from_other_weights(copies, tmp_path):
    model, other = copies
    flip(other / "model.safetensors", byte_of(model, sampled=False))
    file = toml(tmp_path, model_name_or_path=str(model), model_config={}, max_length=16, max_steps=1)
    command = f"ckdist train {file}"
    line = refusal(ranks(command, mounted({model: other}, command)))
    assert line.startswith("rank 1 (") and f"{model}/model.safetensors differs" in line and "in tensor" in line


@pytest.mark.parametrize(
    "first, second, told",
    [
        ("", "-m smollm2", "--model is 'smollm2' on rank 1 ({host}) and None on rank 0 ({host}): start all ranks with"),
        ("-c 64", "-c 128", "--ctx-size is 128 on rank 1 ({host}) and 64 on rank 0 ({host}): start all ranks with"),
        ("--lora a", "--lora b", "--lora is 'b' on rank 1 ({host}) and 'a' on rank 0 ({host}): start all ranks with"),
    ],
)
def test_other_flags(first, second, told):
    import socket

    line = refusal(ranks(f"{GENERATE} {first}", f"{GENERATE} {second}"))
    assert line.startswith(told.format(host=socket.gethostname()))


def test_threads_and_memory_may_differ():
    done = ranks(f"{GENERATE} -t 1", f"{GENERATE} -t 2 --kv-memory 1G -v")
    assert done.returncode == 0, done.stderr


def test_another_command():
    assert "the command is perplexity on rank 1" in refusal(ranks(GENERATE, "ckdist perplexity --token-ids 1,2,3"))


def test_another_build_of_the_library(tmp_path):
    from ckdist import native

    library = tmp_path / "libckdist.so"
    library.write_bytes(native.LIBRARY.read_bytes() + b"\0")
    line = refusal(ranks(GENERATE, f"env CKDIST_LIBRARY={library} {GENERATE}"))
    assert line.startswith("the native library's build is ") and line.endswith("install the same ckdist on every host")


def test_the_best_common_level_of_instructions():
    from ckdist import native

    here = [name for name, lacks in native.isas().items() if not lacks]
    if len(here) < 2:
        pytest.skip("one level alone")
    at = lambda level: f"env CKDIST_ISA={level} {GENERATE} --json"
    best, next_best = here[:2]  # the lowest level computes for seconds
    mixed, alone = ranks(at(best), at(next_best)), ranks(at(next_best), at(next_best))
    assert mixed.returncode == 0, mixed.stderr
    (line,) = mixed.stderr.splitlines()
    assert f"{best} on rank 0 (" in line and line.endswith(f": all compute with {next_best}")
    ids = [json.loads(done.stdout)["token_ids"] for done in (mixed, alone)]
    assert ids[0] == ids[1] and not alone.stderr


# In threads


@contextlib.contextmanager
def changed(folder: pathlib.Path, name: str, content: bytes | None) -> Iterator[None]:
    """The folder's file has other content, or is not there."""
    path = folder / name
    before = path.read_bytes() if path.exists() else None
    path.unlink() if content is None else path.write_bytes(content)
    yield
    path.unlink(missing_ok=True) if before is None else path.write_bytes(before)


def test_every_file_that_ranks_read_is_compared(copies):
    def sampled(world: ThreadWorld) -> None:
        compare_samples(world, model_files(open_checkpoint(copies[world.rank == 1])))

    run_threads(["a", "b", "a", "c"], sampled)  # identical copies
    config = (BUNDLED / "config.json").read_bytes()
    template = b"{{ messages }}"
    for name, content, told in [
        ("config.json", config[:-1] + b" ", f"config.json differs from that on rank 0 (a) at byte {len(config) - 1}: "),
        ("config.json", config + b"\n", f"config.json has {len(config) + 1} bytes, and on rank 0 (a) it has"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json, and rank 0 (a) has "),
        ("chat_template.jinja", template, "rank 0 (a) has no chat_template.jinja, and rank 1 (b) has "),
    ]:
        with changed(copies[1], name, content), pytest.raises(ModelFileError) as refused:
            run_threads(["a", "b", "a", "c"], sampled)
        assert told in str(refused.value) and "\n" not in str(refused.value)
        assert str(refused.value).startswith(("rank 1 (b)", told))
    flip(copies[1] / "tokenizer.json", 200_000)
    with pytest.raises(ModelFileError, match=r"tokenizer.json differs from that on rank 0 \(a\) at byte 200000: copy"):
        run_threads(["a", "b", "a", "c"], sampled)


def test_a_copy_is_read_for_its_ranks_and_its_neighbours(copies, monkeypatch):
    """Each of three copies is read for two thirds, and an other byte is found wherever a rank computes with it."""
    monkeypatch.setattr(whole_comparison, "CHUNK", 1 << 20)
    third = pathlib.Path(shutil.copytree(BUNDLED, copies[0].parent / "third"))
    folders = [*copies, third]
    file, _ = weights_of(third)
    thirds = [(file.size * i // 3, file.size * (i + 1) // 3) for i in range(3)]
    read = []

    def whole(world: ThreadWorld) -> None:
        files = model_files(open_checkpoint(folders[world.rank]))
        path = folders[world.rank] / "model.safetensors"
        WholeComparison(world, files, {path: [thirds[world.rank]]}, threads=1).finish()

    digest = ModelFile.digest
    monkeypatch.setattr(ModelFile, "digest", lambda file, span: (read.append(span), digest(file, span))[1])
    run_threads(["a", "b", "c"], whole)
    assert sum(end - begin for begin, end in read) <= 2 * file.size + 6 * 2**20
    for rank, (begin, end) in enumerate(thirds):
        byte = (begin + end) // 2
        flip(folders[rank] / "model.safetensors", byte)
        told = rf"{folders[rank]}/model.safetensors differs|differs from that on rank {rank} \("
        with pytest.raises(ModelFileError, match=rf"({told}).* at byte {byte}, in tensor "):
            run_threads(["a", "b", "c"], whole)
        flip(folders[rank] / "model.safetensors", byte)


def test_ranks_that_read_one_copy_read_nothing_twice(monkeypatch):
    monkeypatch.setattr(ModelFile, "digest", None)
    monkeypatch.setattr(ModelFile, "digests", None)

    def rank(world: ThreadWorld) -> None:
        files = model_files(open_checkpoint(BUNDLED))
        WholeComparison(world, files, {}, threads=1).finish()
        if len(set(world.hosts)) == 1:
            compare_samples(world, files)

    run_threads(3, rank)
    run_threads(["a", "b"], rank)


def test_values_are_shown_around_their_difference():
    assert shown_apart("'x'", "'y'") == ("'x'", "'y'")
    long = 200 * "a"
    assert shown_apart(f"{long}b{long}", f"{long}c") == ("…" + 12 * "a" + "b" + 23 * "a" + "…", "…" + 12 * "a" + "c")
    flags = flag_values(EngineConfig(threads=3))
    assert "--threads" not in flags and flags["--ctx-size"] == "0"

    def rank(world: ThreadWorld) -> None:
        agree_fields(world, flag_values(ServeConfig(api_key=f"key{world.rank}")), lambda name: f"mend {name}")

    with pytest.raises(ConfigError, match=r"^--api-key is one value on rank 1 \(b\) and another on rank 0 \(a\): mend"):
        run_threads(["a", "b"], rank)
