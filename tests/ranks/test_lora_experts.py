"""LoRA on a model with latent attention and experts: trained on a base in floats and a quantised one, and served."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckdist import LLM, SamplingParams
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError, ModelFileError
from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.training_loss import loss
from ckdist.program.pool import ThreadPool
from ckdist.program.training_tracer import TrainingTracer, trace_loss
from ckdist.train.batch import PackedBatch
from ckdist.train.model import open_model
from ckdist.train.ranks import TrainingRanks
from ckdist.train.stored_tensors import stored_tensors
from ckdist.train.trainer import native_executable, train
from ckdist.weights.adapter_file import FEED_FORWARD, LATENT, MODULES, Lora, load_adapter, save_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.gguf_export import export_gguf
from ckdist.weights.safetensors import read_folder
from tests.support.paths import GOLDEN
from tests.support.reference_training import reference_executable
from tests.support.situations import driven
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config

safetensors = pytest.importorskip("safetensors.numpy")
LORA = GOLDEN / "lora"
ORIGIN = {"fused": "gptoss", "linears": "qwen3moe"}
MODEL = {
    "model_type": "deepseek_v2", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "topk_method": "greedy", "rms_norm_eps": 1e-6,
}  # fmt: skip
BATCH = PackedBatch(
    np.arange(5, 21, dtype=np.int32), np.append(np.arange(6, 21), -1).astype(np.int32), np.array([0, 16], np.int32)
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model from nothing, after a step."""
    c = config(tmp_path_factory.mktemp("base"), model_config=MODEL, max_steps=1, save_dtype="float32")
    train(c)
    return f"{c.output_dir}/model"


def adapting(base, folder, **fields):
    folder.mkdir(exist_ok=True)
    common = {"model_config": {}, "model_name_or_path": base, "lora_r": 4, "lora_alpha": 8.0, "max_length": 16}
    return config(folder, **common | {"lora_target_modules": MODULES, "max_steps": 3, "learning_rate": 1e-2} | fields)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_is_native_is_what_is_defined(base, tmp_path, kind):
    """Experts, and keys of latent vectors, are unpacked by the steps where the base is quantised."""
    if kind == "gguf":
        export_gguf(base, str(tmp_path / "base.gguf"), "q8_0")
        base = str(tmp_path / "base.gguf")
    c = adapting(base, tmp_path)
    model, alone = open_model(c), TrainingRanks(Mesh.of_job(1, 0))
    program = model.lowered(c, alone.mesh, 1)
    native, reference = (
        make(model, c, program, alone, ThreadPool(2)) for make in (native_executable, reference_executable)
    )
    of_experts = {name for name in program.lowered.stored if ".mlp.experts." in name}
    assert len(of_experts) == (3 if kind == "gguf" else 0)
    rng = np.random.default_rng(0)
    for _ in range(2):
        for name, view in native.parameters.items():
            view[:] = reference.parameters[name][:] = 0.05 * rng.standard_normal(view.shape)
        native.zero_grad(), reference.zero_grad()
        assert native.forward_backward(BATCH, reduce=False) == pytest.approx(
            reference.forward_backward(BATCH, reduce=False), rel=1e-5
        )
        for name, gradient in reference.gradients.items():
            assert np.linalg.norm(native.gradients[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name


def test_a_trained_adapter_is_served_as_a_merged_model(base, tmp_path):
    """The same on any mesh; of experts too, chosen ones and shared."""
    curves, adapters = [], []
    for tp in (1, 2):
        c, reports = adapting(base, tmp_path / f"tp{tp}", tensor_parallel_size=tp), []
        run_threads(tp, lambda world, c=c, r=reports: train(c, r.append if world.rank == 0 else None, world=world))
        curves.append([report.loss for report in reports])
        adapters.append(tmp_path / f"tp{tp}" / "out" / "adapter")
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    assert curves[0][-1] < curves[0][0]
    tensors = load_adapter(adapters[0], open_checkpoint(base).spec).matrices
    assert {*LATENT, "o_proj", "gate_proj"} <= {name.split(".")[-3] for name in tensors}
    of_experts = {name.split(".", 4)[4].rpartition(".lora_A")[0] for name in tensors if "expert" in name}
    assert of_experts >= {f"{of}.{part}" for of in ("experts", "shared_expert") for part in FEED_FORWARD}
    checkpoint = open_checkpoint(base)
    weights = {name: read_tensor(source) for name, source in checkpoint.tensors.items()}
    for name in [name for name in tensors if ".lora_A." in name]:
        b = tensors[name.replace("lora_A", "lora_B")]
        weights[name.replace(".lora_A", "")] += b @ tensors[name]
    shutil.copytree(base, tmp_path / "merged")
    stored = {t.name: np.ascontiguousarray(t.values()) for t in stored_tensors(checkpoint.spec, weights)}
    safetensors.save_file(stored, tmp_path / "merged" / "model.safetensors")
    greedy, prompts = SamplingParams(max_tokens=8, temperature=0, logprobs=0), [list(range(4, 20)), [9, 8]]
    exact = {"cache_type_k": "f32", "cache_type_v": "f32"}
    with (
        LLM(str(tmp_path / "merged"), threads=1, **exact) as whole,
        LLM(base, threads=2, lora=str(adapters[0]), **exact) as adapted,
    ):
        for one, other in zip(whole.generate(prompts, greedy), adapted.generate(prompts, greedy), strict=True):
            np.testing.assert_allclose([p[0] for p in other.logprobs], [p[0] for p in one.logprobs], atol=2e-4)


def logits(ranks, model, ids, **settings) -> np.ndarray:  # (tokens, vocab)
    c = EngineConfig(model=str(model), threads=1, cache_type_k="f32", cache_type_v="f32", **settings)

    def rank(world):
        loaded = load_model(c, world)
        found = driven(world, loaded.executable, lambda executable: SingleSequence(executable).feed(ids))
        loaded.close()
        return found

    return run_threads(ranks, rank)[0]


@pytest.mark.parametrize(
    "folder, ranks",
    [
        ("gptoss", 1), ("gptoss", 3), ("mixtral", 2), ("qwen3moe", 3), ("llama3-patterns", 1), ("llama3-patterns", 2),
        ("phi3-patterns", 1), ("phi3-patterns", 2), ("qwen2moe-patterns", 1), ("qwen2moe-patterns", 2),
        ("qwen35-patterns", 1), ("qwen35-patterns", 2),
    ],
)  # fmt: skip
def test_pefts_adapters(folder, ranks):
    """Logits are PEFT's, and with tokens sharded the same bits; of 3 ranks one has nothing of gpt-oss' experts."""
    family = folder.partition("-")[0]
    expected, ids = np.load(LORA / folder / "logits.npy"), np.load(GOLDEN / family / "ids.npy")[:24]
    adapter = str(LORA / folder)
    by_tensor = logits(ranks, GOLDEN / family, ids, lora=adapter, prefill="tensor" if ranks > 1 else "auto")
    assert np.abs(by_tensor - expected).max() < 1e-4
    if ranks > 1:
        by_token = logits(ranks, GOLDEN / family, ids, lora=adapter, prefill="token")
        np.testing.assert_array_equal(by_token, by_tensor)


@pytest.mark.parametrize("targets", [("gate_proj",), ("up_proj",), ("down_proj",)])
def test_some_experts_and_shared_ones_may_have_matrices(base, tmp_path, targets):
    """In a batch of many rows and alone, with ranks and alphas by PEFT's patterns."""
    rng, stored, added = np.random.default_rng(3), {}, {}
    for name, tensor in read_folder(Path(base)).tensors.items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] not in targets or ".experts.3." in name:
            continue
        (rows, columns), rank = tensor.shape, 5 if ".experts.1." in name else 17  # more than a tile's rows
        alpha = 9 if ".experts.2." in name or ".shared_experts." in name else 3.4
        a, b = (0.2 * rng.standard_normal(shape).astype(np.float32) for shape in ((rank, columns), (rows, rank)))
        stored |= {f"base_model.model.{stem}.lora_A.weight": a, f"base_model.model.{stem}.lora_B.weight": b}
        added[name] = np.float32(alpha / rank) * b @ a
    assert any(".shared_experts." in name for name in added) and any(".experts.0." in name for name in added)
    (tmp_path / "adapter").mkdir()
    safetensors.save_file(stored, tmp_path / "adapter" / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "r": 17, "lora_alpha": 3.4, "target_modules": list(targets),
        "rank_pattern": {rf"experts\.1\.{targets[0]}": 5},
        "alpha_pattern": {r".*\.experts\.2\..*": 9, f"shared_experts.{targets[0]}": 9},
    }  # fmt: skip
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(fields))
    shutil.copytree(base, tmp_path / "merged")
    plain = safetensors.load_file(Path(base) / "model.safetensors")
    merged = {name: w + added.get(name, np.float32(0)) for name, w in plain.items()}
    safetensors.save_file(merged, tmp_path / "merged" / "model.safetensors")
    greedy, exact = (
        SamplingParams(max_tokens=6, temperature=0, logprobs=0),
        {"cache_type_k": "f32", "cache_type_v": "f32"},
    )
    prompts = [[9, 8], [7], *(list(range(first, first + 24)) for first in range(4, 200, 20))]
    with (
        LLM(str(tmp_path / "merged"), threads=1, **exact) as whole,
        LLM(base, threads=2, lora=str(tmp_path / "adapter"), **exact) as adapted,
    ):
        together = adapted.generate(prompts, greedy)
        for one, other in zip(whole.generate(prompts, greedy), together, strict=True):
            np.testing.assert_allclose([p[0] for p in other.logprobs], [p[0] for p in one.logprobs], atol=2e-4)
        alone = [adapted.generate([prompt], greedy)[0] for prompt in prompts[:3]]
        assert [one.logprobs for one in alone] == [one.logprobs for one in together[:3]]


@pytest.mark.parametrize("family", ["gptoss", "mixtral"])
@pytest.mark.parametrize("targets", [FEED_FORWARD, ("up_proj", "q_proj"), ("down_proj",)])
def test_what_is_saved_comes_back(family, targets, tmp_path):
    """In the form that PEFT has for the family."""
    rng, spec = np.random.default_rng(0), open_checkpoint(GOLDEN / family).spec
    lora = Lora(3, 7.5, targets)
    program = trace_loss(
        loss, spec, SINGLE, Mesh({"dp": 1}), functools.partial(TrainingTracer, low_rank=lora.low_rank())
    )
    shapes = {w.name: tuple(d.elements for d in w.dims) for w in program.weights if ".lora_" in w.name}
    saved = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_adapter(tmp_path, lora, "base", saved, spec)
    stored = set(safetensors.load_file(tmp_path / "adapter_model.safetensors"))
    experts = {name.split(".", 5)[5] for name in stored if "experts" in name}
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    if family == "mixtral":
        names = {"up_proj": "w3", "gate_proj": "w1", "down_proj": "w2", "q_proj": "q_proj"}
        assert written["target_modules"] == sorted(names[target] for target in targets)
        assert f"block_sparse_moe.experts.3.{names[targets[0]]}.lora_A.weight" in experts
    else:
        inner = "mlp.experts.base_layer" if targets == FEED_FORWARD else "mlp.experts"
        assert f"{inner}.lora_A.weight" in experts
        assert ("down_proj" in targets) == ("mlp.experts.down_proj" in written["target_parameters"])
    tensors = load_adapter(tmp_path, spec).matrices
    delta = lambda of, stem, scale: scale * of[f"{stem}.lora_B.weight"] @ of[f"{stem}.lora_A.weight"]
    for stem in {name.rpartition(".lora_")[0] for name in saved}:
        expected = delta(saved, stem, lora.scale)
        np.testing.assert_allclose(delta(tensors, stem, 1.0), expected, rtol=1e-4, atol=1e-4)


def test_damaged_adapters_on_experts(tmp_path):
    shutil.copytree(LORA / "gptoss", tmp_path / "fused")
    shutil.copytree(LORA / "qwen3moe", tmp_path / "linears")

    def refused(folder, match, tensors=None, **fields):
        path, config = tmp_path / folder, json.loads((LORA / ORIGIN[folder] / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | fields))
        original = safetensors.load_file(LORA / ORIGIN[folder] / "adapter_model.safetensors")
        safetensors.save_file(tensors(original) if tensors else original, path / "adapter_model.safetensors")
        with pytest.raises(ModelFileError, match=match):
            load_adapter(path, open_checkpoint(GOLDEN / ORIGIN[folder]).spec)

    swap = lambda old, new: lambda tensors: {name.replace(old, new): array for name, array in tensors.items()}
    some = lambda keep: lambda tensors: {name: array for name, array in tensors.items() if keep(name)}
    refused("linears", "matrix of expert 9 of .* and the layer has 9 experts", swap("experts.8.", "experts.9."))
    refused("linears", "layers.1.mlp.experts.0.* and the model has no such layer", swap("layers.2.", "layers.1."))
    refused("linears", r"lora_A has 64 columns, and the model needs 36", swap("gate_proj", "down_proj"))
    refused("linears", r"shapes \[2, 36\] and \[64, 2\]; r is 3", r=3)
    refused(
        "fused", "r is 3 in adapter_config.json, and the layer has 5 experts", some(lambda name: "experts" in name), r=3
    )
    refused("fused", r"q_proj.lora_B.weight have shapes .*; r is 4 in", rank_pattern={"q_proj": 4})
    outer = some(lambda name: "experts.lora" in name)
    refused("fused", "target_parameters .* must name gate_up_proj or down_proj there", outer)
    refused("fused", "is not a matrix of LoRA", swap("experts.base_layer", "experts.base_layer.base_layer"))


def test_targets_that_name_no_layer(base, tmp_path):
    with pytest.raises(ConfigError, match=r"lora_target_modules \(k_proj\) names no layer of deepseek_v2"):
        open_model(adapting(base, tmp_path, lora_target_modules=("k_proj",)))
