"""`ckdist merge`, `ckdist export --lora`, and a training of all weights of a GGUF: results leave for other programs."""

import json

import numpy as np
import pytest

from ckdist.cli.main import run
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError
from ckdist.weights.adapter_file import MODULES, Lora, load_adapter, save_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.gguf import read_gguf
from ckdist.weights.gguf_adapter_export import export_adapter
from ckdist.weights.gguf_export import export_gguf
from ckdist.weights.merged_weights import MergedWeights
from tests.support.adapters import random_adapter
from tests.support.paths import GOLDEN

STEMS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a base in GGUF and an adapter with random matrices."""
    folder = tmp_path_factory.mktemp("merge")
    export_gguf(str(BUNDLED), str(folder / "base.gguf"), "f32")
    checkpoint = open_checkpoint(BUNDLED)
    random, matrices = np.random.default_rng(1), {}
    for stem in STEMS:
        rows, columns = checkpoint.tensors[f"{stem}.weight"].shape
        matrices[f"{stem}.lora_A.weight"] = random.normal(size=(4, columns)).astype(np.float32)
        matrices[f"{stem}.lora_B.weight"] = random.normal(size=(rows, 4)).astype(np.float32)
    lora = Lora(4, 8.0, ("q_proj", "down_proj"))
    save_adapter(folder / "adapter", lora, str(BUNDLED), matrices, checkpoint.spec)
    return folder


def expected(files) -> dict[str, np.ndarray]:
    """The merged weights, from the formula."""
    checkpoint = open_checkpoint(BUNDLED)
    weights = {name: read_tensor(source) for name, source in checkpoint.tensors.items()}
    matrices = MergedWeights(checkpoint, files / "adapter").matrices
    for stem in STEMS:
        weights[f"{stem}.weight"] += matrices[f"{stem}.lora_B.weight"] @ matrices[f"{stem}.lora_A.weight"]
    return weights


@pytest.mark.parametrize("base, target", [("folder", "m"), ("folder", "m.gguf"), ("base.gguf", "n.gguf")])
def test_a_merged_model_has_the_adapters_product_in_its_weights(files, base, target):
    model = str(BUNDLED) if base == "folder" else str(files / base)
    adapter = str(files / "adapter")
    assert run(["merge", "-m", model, "--lora", adapter, str(files / target), "--type", "f32"], None) == 0
    written = open_checkpoint(files / target)
    for name, values in expected(files).items():
        assert np.allclose(read_tensor(written.tensors[name]), values, rtol=0, atol=1e-6), name
    if base == "base.gguf":
        old, new = read_gguf(files / base).metadata, read_gguf(files / target).metadata
        assert old.keys() == new.keys() and all(np.array_equal(old[key], new[key]) for key in old)


def test_an_adapter_of_a_gguf_is_in_the_order_of_its_rows(files):
    gguf = pytest.importorskip("gguf")
    base, adapter, out = (str(files / name) for name in ("base.gguf", "adapter", "adapter.gguf"))
    assert run(["export", "--gguf", "--lora", adapter, base, out], None) == 0
    assert run(["merge", "-m", base, "--lora", adapter, str(files / "w.gguf"), "--type", "f32"], None) == 0
    written, *models = (gguf.GGUFReader(path) for path in (out, base, str(files / "w.gguf")))
    field = lambda key: written.get_field(key).contents()
    assert (field("general.type"), field("adapter.type"), field("adapter.lora.alpha")) == ("adapter", "lora", 4.0)
    read, before, after = ({t.name: t.data for t in file.tensors} for file in (written, *models))
    assert len(read) == 4
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        product = read[f"{name}.lora_b"] @ read[f"{name}.lora_a"]
        assert np.allclose(before[name] + product, after[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["llama3", "phi3", "qwen2"])
def test_a_written_adapter_is_read_back_with_the_same_products(tmp_path, model):
    """Also if rows of heads are interleaved (llama3), or several weights are one tensor (phi3)."""
    random_adapter(tmp_path / "peft", GOLDEN / model, MODULES)
    assert export_adapter(str(GOLDEN / model), str(tmp_path / "peft"), str(tmp_path / "a.gguf"))
    spec = open_checkpoint(GOLDEN / model).spec
    old, new = (load_adapter(path, spec).matrices for path in (tmp_path / "peft", tmp_path / "a.gguf"))
    stems = {name.rpartition(".lora_")[0] for name in new}
    assert len(stems) > 4 and stems >= {name.rpartition(".lora_")[0] for name in old}
    for stem in stems:
        before, after = (
            one[f"{stem}.lora_B.weight"] @ one[f"{stem}.lora_A.weight"] if f"{stem}.lora_A.weight" in one else 0.0
            for one in (old, new)
        )
        np.testing.assert_allclose(after, before, atol=1e-5, err_msg=stem)


def test_all_weights_of_a_gguf_are_trained_and_written_as_one(files, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "Say yes.", "completion": "yes"}))
    sets = [word for one in ("max_steps=1", "save_dtype=float32", "threads=1") for word in ("--set", one)]
    for base in (str(BUNDLED), str(files / "base.gguf")):
        out = tmp_path / base.rpartition("/")[2]
        assert run(["tune", "-m", base, str(tmp_path / "a.jsonl"), "--full", "-o", str(out), *sets], None) == 0
    folder = open_checkpoint(tmp_path / BUNDLED.name / "model")
    single = open_checkpoint(tmp_path / "base.gguf" / "model.gguf")
    start = open_checkpoint(BUNDLED)
    for name, source in folder.tensors.items():
        assert np.array_equal(read_tensor(source), read_tensor(single.tensors[name])), name
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(read_tensor(single.tensors[name]), read_tensor(start.tensors[name]))


@pytest.mark.parametrize(
    "words, said",
    [
        (["base.gguf", "out", ""], "is a GGUF: name a file to write, as "),
        (["folder", "out", "q4_k"], "q4_k is a type of GGUF: name a file to write, as "),
    ],
)
def test_a_target_that_cannot_hold_the_model_is_refused(files, words, said):
    model = str(BUNDLED) if words[0] == "folder" else str(files / words[0])
    with pytest.raises(ConfigError, match=said):
        run(["merge", "-m", model, "--lora", str(files / "adapter"), str(files / words[1]), "--type", words[2]], None)
