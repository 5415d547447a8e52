"""Training over replicas and tensors together: one rank's curve on any mesh, over any transport; checkpoints, exports
and going on in another mesh.
"""

import pathlib

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.errors import ConfigError
from ckdist.train.trainer import train
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from tests.support.curves import (
    ROWS,
    WIDE,
    assert_same_curve,
    assert_same_tensors,
    curve,
    metrics,
    tensors,
    wide,
)
from tests.support.launcher import run_ranks
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config, toml


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Eight steps on one rank: where it wrote."""
    c = wide(tmp_path_factory.mktemp("alone"))
    train(c, world=SingleWorld())
    return pathlib.Path(c.output_dir)


@pytest.mark.parametrize(
    "dp, tp, fields",
    [
        (2, 2, {}),
        (1, 3, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}),
        (2, 3, {"zero_stage": 1}),
        (3, 2, {"zero_stage": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}),
        (2, 2, {"activation_checkpointing": True, "optim": "sgd"}),
    ],
)
def test_one_ranks_curve_on_any_mesh(alone, tmp_path, dp, tp, fields):
    """Losses, gradient norms, validation, the checkpoint with its optimizer state, and the finished model."""
    expected = alone
    if "optim" in fields:
        expected = tmp_path / "alone" / "out"
        train(wide(tmp_path / "alone", optim="sgd"), world=SingleWorld())
    c = wide(tmp_path / "mesh", dp, tp, **fields)
    curve(c, dp * tp)
    out = pathlib.Path(c.output_dir)
    assert_same_curve(metrics(out), metrics(expected))
    for name in ("checkpoint-8", "model"):
        assert_same_tensors(out / name, expected / name)


EXPERTS = {**WIDE, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    "dp, tp, fields", [(2, 1, {"zero_stage": 1}), (1, 2, {}), (2, 2, {"activation_checkpointing": True})]
)
def test_experts_on_any_mesh(tmp_path, dp, tp, fields):
    """One rank's curve, and a model whose files have the weights of the checkpoint. The loss that balances experts is
    of a replica's tokens, so replicas are without it.
    """
    model = {**EXPERTS, "output_router_logits": dp == 1, "router_aux_loss_coef": 0.1}
    train(wide(tmp_path / "alone", model_config=model), world=SingleWorld())
    c = wide(tmp_path / "mesh", dp, tp, model_config=model, **fields)
    curve(c, dp * tp)
    out = pathlib.Path(c.output_dir)
    assert_same_curve(metrics(out), metrics(tmp_path / "alone" / "out"))
    assert all(("aux_loss" in line) == (dp == 1) for line in metrics(out))
    found = open_checkpoint(out / "model").tensors
    for name, array in tensors(out / "checkpoint-8").items():
        if name.startswith("weights."):
            np.testing.assert_array_equal(read_tensor(found[name[8:]]), array, err_msg=name)


def test_experts_under_mpirun(tmp_path):
    """From a file, as a user trains; the loss that balances experts is in the metrics and in what is said."""
    fields = {"router_aux_loss_coef": 0.05, "per_device_train_batch_size": ROWS}
    train(config(tmp_path, model_config=EXPERTS, **fields), world=SingleWorld())
    (tmp_path / "ranks").mkdir()
    path = toml(tmp_path / "ranks", model_config=EXPERTS, **fields)
    done = run_ranks(2, "-m", "ckdist.cli.main", "train", str(path), "--tensor-parallel-size", "2", timeout=120)
    assert done.returncode == 0 and " aux loss " in done.stderr, done.stderr
    assert_same_curve(metrics(tmp_path / "ranks" / "out"), metrics(tmp_path / "out"))


def test_going_on_in_the_same_and_in_another_mesh(alone, tmp_path):
    """The same mesh gives the bits of never having stopped; another one the same curve."""
    whole, parts = (wide(tmp_path / name, 2, 2, zero_stage=1) for name in ("whole", "parts"))
    expected = curve(whole, 4)
    curve(wide(tmp_path / "parts", 2, 2, zero_stage=1, max_steps=8), 4, should_stop=lambda: True)  # after the first
    found = curve(parts, 4)
    assert [(r.step, r.loss, r.grad_norm) for r in found] == [(r.step, r.loss, r.grad_norm) for r in expected[1:]]
    for name, array in tensors(pathlib.Path(whole.output_dir) / "model" / "model.safetensors").items():
        other = tensors(pathlib.Path(parts.output_dir) / "model" / "model.safetensors")[name]
        np.testing.assert_array_equal(array, other, err_msg=name)
    curve(wide(tmp_path / "other", 2, 2, zero_stage=1), 4, should_stop=lambda: True)
    curve(wide(tmp_path / "other", 1, 3), 3)
    assert_same_curve(metrics(tmp_path / "other" / "out"), metrics(alone))


@pytest.mark.parametrize("dp, tp", [(2, 2), (1, 3)])
def test_processes_under_mpirun(alone, tmp_path, dp, tp):
    path = toml(tmp_path, model_config=WIDE, eval_steps=4, per_device_train_batch_size=ROWS // dp)
    words = ("train", str(path), "--tensor-parallel-size", str(tp))
    done = run_ranks(dp * tp, "-m", "ckdist.cli.main", *words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"training over {' x '.join(f'{n} {s}' for n, s in (('dp', dp), ('tp', tp)) if s > 1)}: " in done.stderr
    assert_same_curve(metrics(tmp_path / "out"), metrics(alone))


def test_ranks_that_share_no_memory(alone, tmp_path):
    curve(wide(tmp_path, 2, 2, transport="tcp"), 4)
    assert_same_curve(metrics(tmp_path / "out"), metrics(alone))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "1 ranks cannot be a mesh of dp 2 x tp 2, which has 4"),
        ({"expert_parallel_size": 2}, r"expert_parallel_size \(2\) must be 1 with training: batches, layers and"),
    ],
)
def test_meshes_that_cannot_be_are_one_line(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        train(wide(tmp_path / "out", **fields), world=SingleWorld())


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"num_key_value_heads": 2},
            "trained with tensor_parallel_size 3: .*2 kv_heads sharded over tp are shared.*at most 2 ranks",
        ),
        (
            {"intermediate_size": 40},
            r"tensor_parallel_size \(3\) is too large for ffn of .*: it has 40",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_one_line(tmp_path, changes, message):
    (tmp_path / "c").mkdir()
    c = config(tmp_path / "c", model_config={**WIDE, **changes}, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=message):
        run_threads(3, lambda world: train(c, world=world))
