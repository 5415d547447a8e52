"""Models at a URL: what is fetched, that it is what the file has, and what goes wrong."""

import contextlib
import http.server
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckdist.errors import ConfigError, FetchError
from ckdist.hub import remote_file
from ckdist.hub.model_url import shown
from ckdist.hub.remote_file import BLOCK, Parts, joined
from ckdist.hub.resolve import find
from ckdist.hub.store import FOLDER_VARIABLE
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.loader import ShardLoader
from tests.models.test_loader import unpacked
from tests.support.checkpoints import write_model
from tests.support.paths import GOLDEN
from tests.support.programs.range_server import server

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
UP, DOWN = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))


@contextlib.contextmanager
def served(folder, ranges: bool = True):
    """The URL of a folder that is served while the `with` lasts."""
    one = server("127.0.0.1", 0, str(folder), ranges)
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{one.server_port}"
    finally:
        one.shutdown()
        one.server_close()
        thread.join(10)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def model(tmp_path):
    """A folder of two safetensors files."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, CONFIG, dtype=np.float16, parts=2)
    return folder


def bytes_here(folder) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.glob("*.safetensors"))


def test_parts_are_fetched_and_are_what_the_file_has(model, store, monkeypatch):
    """Half of a matrix's rows and a part of a vector; then the same matrix whole, which asks for the rest alone."""
    local = open_checkpoint(model)
    with served(model) as url:
        checkpoint = open_checkpoint(find(url + "/"))
        before = bytes_here(checkpoint.path)
        loader = ShardLoader(checkpoint, 1)
        up = loader.add_matrix(UP, [(512, 1024)])
        norm = loader.add_vector("model.norm.weight", 8, 16)
        loader.load(progress=False)
        wanted = 512 * 512 * 2
        assert wanted <= bytes_here(checkpoint.path) - before <= wanted + 5 * BLOCK
        np.testing.assert_array_equal(unpacked(up), read_tensor(local.tensors[UP])[512:])
        np.testing.assert_array_equal(norm.numpy(), read_tensor(local.tensors["model.norm.weight"])[8:16])
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors[UP]), read_tensor(local.tensors[UP]))
        assert bytes_here(checkpoint.path) - before < 2 * wanted + (1 << 21)
    np.testing.assert_array_equal(read_tensor(checkpoint.tensors[UP]), read_tensor(local.tensors[UP]))
    monkeypatch.setattr(remote_file.time, "sleep", lambda seconds: None)
    with pytest.raises(FetchError, match=r"could not be read at byte .* try again, the fetched data is kept"):
        read_tensor(checkpoint.tensors[DOWN])


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "gguf").glob("*.gguf"))[:3])
def test_gguf_of_every_order(name, store):
    """All weights of a small file, read by the loader."""
    local = open_checkpoint(GOLDEN / "gguf" / name)
    with served(GOLDEN / "gguf") as url:
        remote = open_checkpoint(find(f"{url}/{name}"))
        found = {}
        for of in (local, remote):
            loader = ShardLoader(of, 1)
            handles = [loader.add_matrix(w, [(0, t.shape[-2])]) for w, t in of.tensors.items() if len(t.shape) > 1]
            loader.load(progress=False)
            found[of.path] = [unpacked(handle) for handle in handles]
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_several_ask_at_once_and_each_block_comes_once(model, store, monkeypatch):
    asked: list[tuple[int, int]] = []
    read = remote_file._read_blocks
    monkeypatch.setattr(remote_file, "_read_blocks", lambda *given: asked.append(given[-1]) or read(*given))
    with served(model) as url:
        checkpoint = open_checkpoint(find(url))
        asked.clear()
        with ThreadPoolExecutor(4) as pool:
            tensors = list(pool.map(lambda _: read_tensor(checkpoint.tensors[UP]), range(4)))
    assert all((tensor == tensors[0]).all() for tensor in tensors)
    blocks = [block for begin, end in asked for block in range(begin, end)]
    assert len(blocks) == len(set(blocks)) > 0


def test_a_file_that_changes_is_fetched_again(model, store):
    with served(model) as url:
        before = read_tensor(open_checkpoint(find(url)).tensors[UP])
        write_model(model, CONFIG, dtype=np.float16, parts=2, **{UP: -before.astype(np.float16)})
        for path in model.iterdir():
            os.utime(path, (2_000_000_000, 2_000_000_000))
        after = read_tensor(open_checkpoint(find(url)).tensors[UP])
    np.testing.assert_array_equal(after, -before)


def test_what_goes_wrong_is_one_line(model, store):
    with served(model, ranges=False) as url, pytest.raises(FetchError, match="cannot be read in parts"):
        read_tensor(open_checkpoint(find(url)).tensors[UP])
    with served(model) as url, pytest.raises(FetchError, match=r"none\.gguf does not exist"):
        find(f"{url}/none.gguf?key=secret")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../other.safetensors"}}')
    with served(model) as url, pytest.raises(ConfigError, match="is not the name of a model's file"):
        find(url)
    for damaged in ("[1]", "[" * 60_000):
        (model / "model.safetensors.index.json").write_text(damaged)
        with served(model) as url, pytest.raises(FetchError, match="is damaged"):
            find(url)
    with pytest.raises(ConfigError, match="is neither a file or folder"):
        find("simplecache::https://host/model.gguf")
    with pytest.raises(ConfigError, match="not a URL that a model is read from"):
        find("nonsense://host/model.gguf")


def test_a_damaged_record_is_one_line(model, store):
    with served(model) as url:
        checkpoint = open_checkpoint(find(url))
    record = checkpoint.path / "model-00001-of-00002.safetensors.parts"
    record.write_text('{"url": 1}')
    with pytest.raises(FetchError, match=r"cannot be read .* remove "):
        open_checkpoint(checkpoint.path)


def test_short_answers_and_lost_connections_are_asked_again(model, store, monkeypatch):
    """Three times in four nothing comes, or half of it."""
    monkeypatch.setattr(remote_file.time, "sleep", lambda seconds: None)
    turns = iter(range(1 << 30))
    copy = http.server.SimpleHTTPRequestHandler.copyfile

    def copyfile(self, source, output):
        if self.headers.get("Range") and next(turns) % 4 < 3:
            output.write(source.read(100))
            self.close_connection = True
            return
        copy(self, source, output)

    local = read_tensor(open_checkpoint(model).tensors[UP])
    with served(model) as url:
        monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "copyfile", copyfile)
        monkeypatch.setattr(remote_file, "REQUESTS", 1)
        np.testing.assert_array_equal(read_tensor(open_checkpoint(find(url)).tensors[UP]), local)


def test_urls_are_shown_without_what_is_secret():
    assert shown("https://user:word@host/a/b.gguf?key=1") == "https://host/a/b.gguf"


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(ranges, ranges)
def test_ranges_are_sets_of_blocks(here, wanted):
    blocks = lambda found: {block for begin, end in found for block in range(begin, end)}
    parts = Parts("", 0, {}).with_these(here)
    assert blocks(parts.here) == blocks(here) and list(parts.here) == joined(here)
    missing = parts.without_those_here(joined(wanted))
    assert blocks(missing) == blocks(wanted) - blocks(here) and missing == joined(missing)
    assert blocks(parts.with_these(missing).here) == blocks(here) | blocks(wanted)
