"""LoRA on a model with latent attention and experts: trained on a base in floats and a quantised one, and served."""

import shutil

import numpy as np
import pytest

from ckdist import LLM, SamplingParams
from ckdist.cli.export import export_gguf
from ckdist.errors import ConfigError, ModelFileError
from ckdist.mesh import Mesh
from ckdist.program.pool import ThreadPool
from ckdist.train.batch import PackedBatch
from ckdist.train.model import open_model
from ckdist.train.ranks import TrainingRanks
from ckdist.train.stored_tensors import stored_tensors
from ckdist.train.trainer import native_executable, reference_executable, train
from ckdist.weights.adapter import LATENT, MODULES, Adapter, Lora, load_adapter, save_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config

safetensors = pytest.importorskip("safetensors.numpy")
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
    program = model.lowered(c, alone.mesh)
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
    """The same on any mesh; no expert has matrices."""
    curves, adapters = [], []
    for tp in (1, 2):
        c, reports = adapting(base, tmp_path / f"tp{tp}", tensor_parallel_size=tp), []
        run_threads(tp, lambda world, c=c, r=reports: train(c, r.append if world.rank == 0 else None, world=world))
        curves.append([report.loss for report in reports])
        adapters.append(tmp_path / f"tp{tp}" / "out" / "adapter")
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    assert curves[0][-1] < curves[0][0]
    lora, tensors = load_adapter(adapters[0])
    assert {*LATENT, "o_proj", "gate_proj"} <= set(lora.targets)
    assert not [name for name in tensors if "expert" in name]
    checkpoint = open_checkpoint(base)
    weights = {name: read_tensor(source) for name, source in checkpoint.tensors.items()}
    for name in [name for name in tensors if ".lora_A." in name]:
        b = tensors[name.replace("lora_A", "lora_B")]
        weights[name.replace(".lora_A", "")] += np.float32(lora.scale) * b @ tensors[name]
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


def test_matrices_on_experts_are_refused(base, tmp_path):
    name = "model.layers.1.mlp.experts.0.gate_proj.lora_{}.weight"
    matrices = {name.format("A"): np.zeros((2, 64), np.float32), name.format("B"): np.zeros((64, 2), np.float32)}
    save_adapter(tmp_path / "adapter", Lora(2, 4.0, ("gate_proj",)), base, matrices)
    with pytest.raises(ModelFileError, match="experts cannot have matrices of LoRA: train one without"):
        Adapter(tmp_path / "adapter").check(open_model(adapting(base, tmp_path)).program)
    with pytest.raises(ConfigError, match=r"lora_target_modules \(k_proj\) names no layer of deepseek_v2"):
        open_model(adapting(base, tmp_path, lora_target_modules=("k_proj",)))
