"""rsLoRA, DoRA and LoRA's dropout: gradients beside PEFT's, on any mesh; DoRA's files; refusals."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckdist import LLM
from ckdist.cli.main import run
from ckdist.comm.communicator import open_communicator
from ckdist.errors import ConfigError, ModelFileError
from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.program.tracer import trace
from ckdist.program.training_tracer import TrainingTracer
from ckdist.train.batch import PackedBatch
from ckdist.train.trainer import train
from ckdist.weights.adapter_file import MAGNITUDE, Lora, load_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.merged_weights import MergedWeights
from tests.support.golden_training import batches, model
from tests.support.interpreter import Interpreter
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config
from tests.support.training_executable import executable

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
CASES = {"rslora": {"rank_stabilized": True}, "dora": {"has_magnitudes": True}, "dropout": {"dropout": 0.3}}
DORA = GOLDEN / "adapters" / "dora"


def golden(case: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    with np.load(GOLDEN / "adapters" / "gradients.npz") as stored:
        found = {name.removeprefix(f"{case}/"): stored[name] for name in stored.files if name.startswith(f"{case}/")}
        return stored["keys"], found


@pytest.mark.parametrize(
    "case, tp, recompute",
    [*((case, tp, False) for case in CASES for tp in (1, 2)), ("dora", 1, True), ("dropout", 2, True)],
)
def test_gradients_are_pefts(case, tp, recompute):
    spec, weights = model("qwen2")
    keys, expected = golden(case)
    values = {name.removeprefix("value/"): array for name, array in expected.items() if name.startswith("value/")}
    lora, own = Lora(3, 5.0, TARGETS, **CASES[case]), batches()[0]
    batch = PackedBatch(own.token_ids, own.targets, own.starts, keys=keys if case == "dropout" else None)

    def gradients(world):
        ranks = open_communicator(world, timeout=20) if tp > 1 else None
        tracer = functools.partial(TrainingTracer, low_rank=lora.low_rank())
        load = lambda name: values[name] if name in values else weights[name]
        made = executable(
            spec, 64, load, communicator=ranks, tp=tp, trained=list(values), tracer=tracer, recompute=recompute
        )
        made.zero_grad()
        loss = made.forward_backward(batch)
        parts = {name: made.program.shards.part(name, expected[f"gradient/{name}"]) for name in values}
        return loss, {name: (made.gradients[name].copy(), part) for name, part in parts.items()}

    for loss, found in run_threads(tp, gradients) if tp > 1 else [gradients(None)]:
        assert loss == pytest.approx(float(expected["loss"]), rel=1e-6)
        for name, (gradient, part) in found.items():
            assert np.linalg.norm(gradient - part) < 2e-5 * np.linalg.norm(part), name
            assert np.linalg.norm(part) > 0


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    c = config(
        tmp_path_factory.mktemp("base"),
        max_steps=1,
        model_config=config(tmp_path_factory.mktemp("c")).model_config | {"tie_word_embeddings": False},
    )
    train(c)
    return f"{c.output_dir}/model"


def adapting(base, folder, **fields):
    folder.mkdir(exist_ok=True)
    common = {"model_config": {}, "model_name_or_path": base, "lora_r": 3, "lora_target_modules": ("all-linear",)}
    return config(
        folder,
        **common | {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 4} | fields,
    )


def test_a_mask_does_not_depend_on_the_ranks(base, tmp_path):
    """Nor on batches, stages, shards, or a stop. Without keys nothing is dropped: in the validation loss."""
    meshes = {
        "one": {}, "dp2": {"per_device_train_batch_size": 2}, "pp2": {"pipeline_parallel_size": 2},
        "tp2": {"tensor_parallel_size": 2}, "again": {"activation_checkpointing": True},
        "plain": {"lora_dropout": 0.0},
    }  # fmt: skip
    curves = {}
    for name, fields in meshes.items():
        c, reports = adapting(base, tmp_path / name, **{"lora_dropout": 0.4} | fields), []
        ranks = 2 if name[-1] == "2" else 1
        run_threads(
            ranks,
            lambda world, c=c, reports=reports: train(c, reports.append if world.rank == 0 else None, world=world),
        )
        curves[name] = [report.loss for report in reports]
    for name in set(meshes) - {"plain"}:
        np.testing.assert_allclose(curves[name], curves["one"], rtol=2e-6, err_msg=name)
    assert np.abs(np.subtract(curves["plain"], curves["one"])[1:]).max() > 1e-3
    written = lambda c: (Path(c.output_dir) / "adapter" / "adapter_model.safetensors").read_bytes()
    whole, half = (adapting(base, tmp_path / name, lora_dropout=0.4) for name in ("one", "half"))
    train(replace(half, save_steps=2), should_stop=iter([False, True]).__next__)
    train(half)
    assert written(half) == written(whole)


def test_magnitudes_are_trained_saved_merged_and_not_served(base, tmp_path):
    c, reports = adapting(base, tmp_path / "dora", use_dora=True), []
    train(c, reports.append)
    plain = []
    train(adapting(base, tmp_path / "lora"), plain.append)
    assert reports[0].loss == pytest.approx(plain[0].loss, rel=1e-6), "it begins as the base"
    assert reports[-1].loss < reports[0].loss and reports[-1].loss != plain[-1].loss
    adapter = f"{c.output_dir}/adapter"
    stored = load_adapter(Path(adapter), open_checkpoint(base).spec, merging=True)
    assert sum(name.endswith(MAGNITUDE) for name in stored.matrices) == 7 * 2
    with pytest.raises(
        ModelFileError, match=r"use_dora is True, which is not supported, .*: merge it with ckdist merge"
    ):
        LLM(base, lora=adapter)
    assert run(["merge", "-m", base, "--lora", adapter, str(tmp_path / "merged"), "--type", "f32"], None) == 0
    merged, steps = replace(c, model_name_or_path=str(tmp_path / "merged"), output_dir=str(tmp_path / "on")), []
    train(replace(merged, use_dora=False, max_steps=1, learning_rate=0.0), steps.append)
    assert steps[0].eval_loss == pytest.approx(reports[-1].eval_loss, rel=1e-5)


def test_a_merged_adapter_of_peft_has_its_logits():
    checkpoint = open_checkpoint(GOLDEN / "qwen2")
    merged = MergedWeights(checkpoint, DORA)
    load = lambda name: merged.rows(name, checkpoint.tensors[name], 0, checkpoint.tensors[name].shape[0])
    program = trace(forward, checkpoint.spec, SINGLE, Mesh({"tp": 1}))
    logits = Interpreter(program, checkpoint.spec, Mesh({"tp": 1}), load).run(
        np.load(GOLDEN / "qwen2" / "ids.npy")[:24]
    )
    np.testing.assert_allclose(logits, np.load(DORA / "logits.npy"), atol=2e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lora_r": 0, "use_dora": True}, "use_dora (True) has no effect without lora_r"),
        ({"lora_dropout": 0.1, "use_dora": True}, "use_dora (True) must be False with lora_dropout 0.1"),
        ({"lora_dropout": 0.1, "method": "dpo"}, "method (dpo) must be sft with lora_dropout 0.1"),
    ],
)
def test_what_would_not_be_applied_is_refused(base, tmp_path, fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        adapting(base, tmp_path / "refused", **fields)
