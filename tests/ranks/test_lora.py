"""LoRA: what is added, what is trained, and adapters in PEFT's format."""

import json
import shutil

import numpy as np
import pytest

from ckdist import LLM, SamplingParams
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError, ModelFileError
from ckdist.mesh import Mesh
from ckdist.program.pool import ThreadPool
from ckdist.train.batch import PackedBatch
from ckdist.train.model import open_model
from ckdist.train.ranks import TrainingRanks
from ckdist.train.trainer import native_executable, train
from ckdist.weights.adapter_file import MODULES, Lora, load_adapter, save_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.dtypes import Q8_0
from ckdist.weights.gguf_export import export_gguf
from tests.support.adapters import random_adapter
from tests.support.launcher import run_ranks
from tests.support.reference_training import reference_executable
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config

safetensors = pytest.importorskip("safetensors.numpy")
EXACT = ("-ctk", "f32", "-ctv", "f32")
BATCH = PackedBatch(
    np.arange(5, 21, dtype=np.int32), np.append(np.arange(6, 21), -1).astype(np.int32), np.array([0, 16], np.int32)
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that was trained for a step."""
    c = config(tmp_path_factory.mktemp("base"), max_steps=1)
    train(c)
    return f"{c.output_dir}/model"


def adapting(base, folder, **fields):
    common = {
        "model_config": {},
        "model_name_or_path": base,
        "lora_r": 4,
        "lora_alpha": 8.0,
        "lora_target_modules": ("q_proj", "down_proj"),
        "max_length": 16,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
    }
    return config(folder, **common | fields)


def test_it_begins_as_the_base_and_adds_what_peft_defines(base, tmp_path):
    c = adapting(base, tmp_path)
    model = open_model(c)
    alone = TrainingRanks(Mesh.of_job(1, 0))
    adapted, plain = (
        reference_executable(m, c, m.lowered(c, alone.mesh, 1), alone, ThreadPool(1))
        for m in (model, open_model(adapting(base, tmp_path, lora_r=0)))
    )
    assert len(adapted.parameters) == 2 * 2 * len(model.spec.layers) and all(
        ".lora_" in name for name in adapted.parameters
    )
    assert adapted.loss(BATCH) == plain.loss(BATCH)
    rng = np.random.default_rng(0)
    for name, view in adapted.parameters.items():
        view[:] = 0.05 * rng.standard_normal(view.shape)
        if ".lora_A." in name:
            continue
        stem = name.removesuffix(".lora_B.weight")
        a, scale = adapted.parameters[f"{stem}.lora_A.weight"], c.lora_alpha / c.lora_r
        plain.parameters[f"{stem}.weight"][:] += scale * (view @ a)  # merged, as in the paper
    assert adapted.loss(BATCH) == pytest.approx(plain.loss(BATCH), rel=1e-5)
    assert adapted.forward_backward(BATCH, reduce=False) == pytest.approx(
        plain.forward_backward(BATCH, reduce=False), rel=1e-5
    )
    for name, gradient in adapted.gradients.items():  # by the chain rule from the merged matrix's
        stem = name.partition(".lora_")[0]
        a, b = (adapted.parameters[f"{stem}.lora_{kind}.weight"] for kind in "AB")
        whole = scale * plain.gradients[f"{stem}.weight"]
        np.testing.assert_allclose(
            gradient, b.T @ whole if ".lora_A." in name else whole @ a.T, rtol=2e-3, atol=2e-3 * np.abs(gradient).max()
        )


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_is_native_is_what_is_defined(base, tmp_path, kind):
    if kind == "gguf":
        export_gguf(base, str(tmp_path / "base.gguf"), "q8_0")
        base = str(tmp_path / "base.gguf")
    c = adapting(base, tmp_path, lora_target_modules=MODULES, lora_r=3, activation_checkpointing=True)
    model = open_model(c)
    alone = TrainingRanks(Mesh.of_job(1, 0))
    program = model.lowered(c, alone.mesh, 1)
    native, reference = (
        make(model, c, program, alone, ThreadPool(2)) for make in (native_executable, reference_executable)
    )
    if kind == "gguf":
        stored = {p.name for p in native.program.lowered.parameters if p.stored}
        quantised = {n for n, t in open_checkpoint(base).tensors.items() if t.type == Q8_0.number}
        assert stored == quantised - {"lm_head.weight"}, "a quantised base is held once, tied embeddings too"
    rng = np.random.default_rng(0)
    for _ in range(2):  # the second has other adapters on the base that was packed in the first
        for name, view in native.parameters.items():
            view[:] = reference.parameters[name][:] = 0.05 * rng.standard_normal(view.shape)
        native.zero_grad(), reference.zero_grad()
        assert native.forward_backward(BATCH, reduce=False) == pytest.approx(
            reference.forward_backward(BATCH, reduce=False), rel=1e-5
        )
        for name, gradient in reference.gradients.items():
            assert np.linalg.norm(native.gradients[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name
        assert native.loss(BATCH) == pytest.approx(reference.loss(BATCH), rel=1e-5)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_adapters_are_the_same_on_any_mesh(base, tmp_path, kind):
    """A quantised base is sharded as its blocks allow."""
    if kind == "gguf":
        export_gguf(base, str(tmp_path / "base.gguf"), "q8_0")
        base = str(tmp_path / "base.gguf")
    curves, found = {}, {}
    for dp, tp in ((1, 1), (3, 1), (2, 2)):
        (tmp_path / f"{dp}x{tp}").mkdir()
        c = adapting(
            base,
            tmp_path / f"{dp}x{tp}",
            lora_target_modules=MODULES,
            max_steps=3,
            per_device_train_batch_size=6 // dp,
            learning_rate=1e-2,
            tensor_parallel_size=tp,
        )
        reports = []
        run_threads(dp * tp, lambda world: train(c, reports.append if world.rank == 0 else None, world=world))
        curves[dp, tp] = [report.loss for report in reports]
        found[dp, tp] = safetensors.load_file(tmp_path / f"{dp}x{tp}" / "out" / "adapter" / "adapter_model.safetensors")
        assert len(curves[dp, tp]) == 3
    for mesh, losses in curves.items():
        np.testing.assert_allclose(losses, curves[1, 1], rtol=1e-5, err_msg=str(mesh))
        assert set(found[mesh]) == set(found[1, 1])
        for name, array in found[1, 1].items():
            np.testing.assert_allclose(found[mesh][name], array, rtol=1e-3, atol=1e-4, err_msg=name)
    assert curves[1, 1][-1] < curves[1, 1][0]


def test_trained_adapters_are_pefts_files_and_come_back(base, tmp_path):
    c = adapting(base, tmp_path)
    train(c)
    folder = tmp_path / "out" / "adapter"
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"], written["target_modules"]) == (
        "LORA",
        4,
        8.0,
        ["down_proj", "q_proj"],
    )
    stored = safetensors.load_file(folder / "adapter_model.safetensors")
    assert stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert stored["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].any(), "B has left zero"
    spec = open_checkpoint(base).spec
    matrices = load_adapter(folder, spec).matrices
    assert len(matrices) == len(stored)
    for name, array in stored.items():
        factor = 8.0 / 4 if ".lora_B." in name else 1.0
        np.testing.assert_array_equal(matrices[name.removeprefix("base_model.model.")], factor * array)
    save_adapter(tmp_path / "stable", Lora(4, 8.0, ("down_proj", "q_proj"), True), "base", matrices, spec)
    assert json.loads((tmp_path / "stable" / "adapter_config.json").read_text())["use_rslora"] is True
    for name, array in load_adapter(
        tmp_path / "stable", spec
    ).matrices.items():  # scaled by alpha / sqrt(r), as trained
        np.testing.assert_array_equal(
            array, (Lora(4, 8.0, ("q_proj",), True).scale if "lora_B" in name else 1) * matrices[name]
        )
    save_adapter(tmp_path / "again", Lora(4, 4.0, ("down_proj", "q_proj")), "base", matrices, spec)
    again = load_adapter(tmp_path / "again", spec)
    assert not again.notes and set(again.matrices) == set(matrices)
    for name, array in again.matrices.items():
        np.testing.assert_array_equal(array, matrices[name])


def test_targets_are_checked(base, tmp_path):
    with pytest.raises(ConfigError, match=r"lora_target_modules \(qproj\) must be some of q_proj"):
        open_model(adapting(base, tmp_path, lora_target_modules=("qproj",)))


def merged(folder, model, added) -> str:
    """The model with the adapter added to its weights, as a folder."""
    shutil.copytree(model, folder)
    tensors = {
        name: read_tensor(source) for name, source in open_checkpoint(model).tensors.items() if name != "lm_head.weight"
    }
    safetensors.save_file(
        {name: np.ascontiguousarray(t + added.get(name, np.float32(0))) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    return str(folder)


def logits(folder, ranks, model, *flags) -> np.ndarray:  # (tokens, vocab)
    out = folder / "logits.npy"
    command = [
        "-m",
        "ckdist.cli.main",
        "perplexity",
        "-m",
        model,
        "--token-ids",
        ",".join(map(str, range(4, 34))),
        "--save-logits",
        str(out),
        "-t",
        "1",
        *flags,
    ]
    done = run_ranks(ranks, *command)
    assert done.returncode == 0, done.stderr
    return np.load(out)


@pytest.fixture(scope="module")
def float32_base(base, tmp_path_factory):
    return merged(tmp_path_factory.mktemp("float32") / "base", base, {})


@pytest.fixture(scope="module")
def served(float32_base, tmp_path_factory):
    """An adapter's folder, and the logits of the base that it was added to."""
    folder = tmp_path_factory.mktemp("served")
    added = random_adapter(folder / "adapter", float32_base, MODULES)
    return str(folder / "adapter"), logits(folder, 1, merged(folder / "merged", float32_base, added), *EXACT)


@pytest.mark.parametrize("ranks, lora", [(1, True), (1, False)])
def test_a_served_adapter_is_a_merged_model(float32_base, served, tmp_path, ranks, lora):
    adapter, expected = served
    got = logits(tmp_path, ranks, float32_base, *EXACT, *(("--lora", adapter) if lora else ()))
    apart = np.abs(got - expected).max() / np.abs(expected).max()
    assert apart < 1e-5 if lora else apart > 0.05


@pytest.mark.parametrize("ranks", [3])
def test_an_adapter_gives_the_same_bits_with_tokens_sharded(float32_base, served, tmp_path, ranks):
    adapter, expected = served
    by_token, by_tensor = (
        logits(tmp_path, ranks, float32_base, *EXACT, "--lora", adapter, "--prefill", way)
        for way in ("token", "tensor")
    )
    np.testing.assert_array_equal(by_token, by_tensor)
    assert np.abs(by_token - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("targets", [("v_proj",), ("gate_proj",), ("up_proj", "o_proj")])
def test_any_of_the_layers_may_have_matrices(float32_base, tmp_path, targets):
    added = random_adapter(tmp_path / "adapter", float32_base, targets, rank=17)
    with (
        LLM(merged(tmp_path / "merged", float32_base, added), threads=1) as whole,
        LLM(float32_base, threads=2, lora=str(tmp_path / "adapter")) as adapted,
    ):
        prompts, greedy = (
            [list(range(4, 20)), [9, 8], [20, 21, 22, 23]],
            SamplingParams(max_tokens=12, temperature=0, logprobs=0),
        )
        for one, other in zip(whole.generate(prompts, greedy), adapted.generate(prompts, greedy), strict=True):
            np.testing.assert_allclose([p[0] for p in other.logprobs], [p[0] for p in one.logprobs], atol=2e-4)


def test_the_base_of_a_served_adapter_may_be_quantised(float32_base, tmp_path):
    export_gguf(float32_base, str(tmp_path / "base.gguf"), "q8_0")
    added = random_adapter(tmp_path / "adapter", float32_base, MODULES)
    dequantised = {
        name: read_tensor(source) for name, source in open_checkpoint(tmp_path / "base.gguf").tensors.items()
    }
    base = merged(
        tmp_path / "dequantised",
        float32_base,
        {
            name: t - read_tensor(open_checkpoint(float32_base).tensors[name])
            for name, t in dequantised.items()
            if name != "lm_head.weight"
        },
    )
    expected = logits(tmp_path, 1, merged(tmp_path / "merged", base, added))
    got = logits(tmp_path, 2, str(tmp_path / "base.gguf"), "--lora", str(tmp_path / "adapter"))
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)  # apart by the 8 bits of what is multiplied


def test_adapters_of_other_models_are_refused(float32_base, tmp_path):
    random_adapter(tmp_path / "adapter", str(BUNDLED), ("q_proj",))
    with pytest.raises(ModelFileError, match=r"layers.2.self_attn.q_proj.* and the model has no such layer"):
        LLM(float32_base, lora=str(tmp_path / "adapter"))
    stored = safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    first = {name: array for name, array in stored.items() if ".layers.0." in name}
    safetensors.save_file(first, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(
        ModelFileError, match=r"q_proj.lora_A.weight has shape \[5, 512\], and the model needs \[5, 32\]"
    ):
        LLM(float32_base, lora=str(tmp_path / "adapter"))
    with pytest.raises(ModelFileError, match=r"adapter_config.json"):
        LLM(float32_base, lora=str(tmp_path))
