"""Ranks that divide the tokens of each sequence: losses, gradients and curves are those of one rank, and PyTorch's."""

import pathlib

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import SingleWorld
from ckdist.errors import ConfigError
from ckdist.layout import DATA
from ckdist.mesh import Mesh
from ckdist.models.training_loss import loss as loss_of
from ckdist.program.pool import ThreadPool
from ckdist.program.training_tracer import trace_loss
from ckdist.train.batch import PackedBatch
from ckdist.train.data.divided_batch import own_part, tokens_of_rank
from ckdist.train.loss_program import lower_model
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.ranks import TrainingRanks
from ckdist.train.trainer import train
from tests.support.curves import WIDE, assert_same_curve, curve, metrics, wide
from tests.support.golden_training import GRADIENT_ERROR, LOSS_ERROR, batches, golden, gradient_errors, model
from tests.support.specs import PIECES
from tests.support.specs import spec as small_spec
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable


def divided(spec, weights, batch, ranks, dtype="float32", **more):
    """The loss and the gradients of a batch that `ranks` ranks divide."""

    def body(world):
        communicator = open_communicator(world)
        mesh = Mesh.of_job(ranks, world.rank, sp=ranks)
        program = lower_model(spec, tokens_of_rank(len(batch.token_ids), ranks), dtype, mesh, **more)
        e = NativeExecutable(program, weights.__getitem__, ranks=TrainingRanks.split(mesh, communicator))
        loss = e.forward_backward(batch)
        assert e.loss(batch) == pytest.approx(loss, rel=1e-6)
        found = loss, {name: gradient.copy() for name, gradient in e.gradients.items()}
        e.close()
        communicator.close()
        return found

    losses, gradients = zip(*run_threads(ranks, body), strict=True)
    for name, gradient in gradients[0].items():
        np.testing.assert_array_equal(gradient, gradients[-1][name], err_msg=name)
    return sum(losses), gradients[0]


@pytest.mark.parametrize("family, ranks", [("llama3", 2), ("gemma3", 4), ("deepseek_dense", 2)])
def test_losses_and_gradients_of_pytorch(family, ranks):
    """Llama, alternating windows, and latent attention."""
    loss, gradients = divided(*model(family), batches()[0], ranks)
    expected = golden(family)
    assert loss == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert max(gradient_errors(expected, gradients).values()) < 2 * GRADIENT_ERROR["float32"]


WINDOWS = {"changes": ({"window": 21}, {"window": -24}), "mixer": {"soft_cap": 3.0}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lengths, ranks, more",
    [([300], 2, {}), ([3, 1, 150, 99], 4, WINDOWS), ([37, 131], 3, PIECES["sinks_and_biases"])],
)
def test_boundaries_windows_and_sinks(lengths, ranks, more, dtype):
    """Sequences that begin and end anywhere in a chunk, and some without a target."""
    spec, rng = small_spec(**more), np.random.default_rng(5)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {w.name: 0.2 * rng.standard_normal([d.elements for d in w.dims]) for w in program.weights}
    size, starts = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)
    ids, targets = rng.integers(0, spec.vocab_size, (2, size)).astype(np.int32)
    targets[: size // 3] = np.where(rng.random(size // 3) < 0.5, targets[: size // 3], -1)
    targets[starts[-2] :] = targets[starts[-2] :] if len(lengths) == 1 else -1
    batch = PackedBatch(ids, targets, starts, weights=rng.random(size).astype(np.float32))
    alone = executable(spec, size, weights.__getitem__, dtype)
    expected = alone.forward_backward(batch)
    loss, gradients = divided(spec, weights, batch, ranks, dtype, recompute=bool(more))
    assert loss == pytest.approx(expected, rel=LOSS_ERROR[dtype])
    floor = 0.05 * max(np.linalg.norm(g) for g in alone.gradients.values())
    for name, g in alone.gradients.items():
        assert np.linalg.norm(gradients[name] - g) < GRADIENT_ERROR[dtype] * max(np.linalg.norm(g), floor), name
    alone.close()


@pytest.mark.parametrize("more", [{}, WINDOWS])
def test_threads_that_divide_a_sequence_change_no_bit(more):
    spec, rng = small_spec(kv_heads=1, heads=2, **more), np.random.default_rng(1)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {w.name: 0.2 * rng.standard_normal([d.elements for d in w.dims]) for w in program.weights}
    ids, targets = rng.integers(0, spec.vocab_size, (2, 700)).astype(np.int32)
    found = []
    for threads in (1, 4):
        e = executable(spec, 700, weights.__getitem__, pool=ThreadPool(threads))
        loss = e.forward_backward(PackedBatch(ids, targets, np.array([0, 700])))
        found.append((loss, e.gradients.flat.copy()))
        e.close()
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    c = wide(tmp_path_factory.mktemp("alone"), max_steps=4)
    train(c, world=SingleWorld())
    return pathlib.Path(c.output_dir)


@pytest.mark.parametrize(
    "dp, fields",
    [
        (2, {"zero_stage": 1}),
        (1, {"tensor_parallel_size": 3}),
        (1, {"pipeline_parallel_size": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}),
    ],
)
def test_one_ranks_curve_on_any_mesh(alone, tmp_path, dp, fields):
    c = wide(tmp_path, dp, sequence_parallel_size=2, max_steps=4, **fields)
    curve(c, 2 * dp * c.tensor_parallel_size * c.pipeline_parallel_size)
    assert_same_curve(metrics(pathlib.Path(c.output_dir)), metrics(alone))


def test_a_run_goes_on_with_divided_sequences(alone, tmp_path):
    curve(wide(tmp_path, max_steps=4), 1, should_stop=lambda: True)  # after the first step
    curve(wide(tmp_path, max_steps=4, sequence_parallel_size=4, activation_checkpointing=True), 4)
    assert_same_curve(metrics(tmp_path / "out"), metrics(alone))


def test_lora_of_divided_sequences(alone, tmp_path):
    fields = {"model_name_or_path": str(alone / "model"), "model_config": {}, "lora_r": 4, "lora_dropout": 0.2}
    for name, ranks in (("whole", 1), ("parts", 2)):
        curve(wide(tmp_path / name, sequence_parallel_size=ranks, max_steps=3, **fields), ranks)
    assert_same_curve(metrics(tmp_path / "parts" / "out"), metrics(tmp_path / "whole" / "out"))


def test_the_parts_of_a_batch_have_every_token_once():
    size, ranks = 50, 3
    batch = PackedBatch(np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int32), np.array([0, 20, 50]))
    parts = [own_part(batch, ranks, rank) for rank in range(ranks)]
    assert all(len(part.token_ids) == tokens_of_rank(size, ranks) == 32 for part in parts)
    assert sorted(t for part in parts for t in part.targets if t >= 0) == list(range(size))
    assert [part.starts.tolist() for part in parts] == [[0, 20, 50, 96]] * ranks
    assert parts[0].targets[:16].tolist() == list(range(16)) and set(parts[0].targets[16:]) == {-1}


EXPERTS = {**WIDE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"method": "dpo"}, r"method \(dpo\) must be sft with sequence_parallel_size 2: a rank needs whole sequences"),
        ({"samples": 1}, r"samples \(1\) must be 0 with sequence_parallel_size 2"),
        ({"sequence_parallel_size": 3}, "2 ranks cannot be a mesh of sp 3, which has 3"),
        (
            {"model_config": {**EXPERTS, "output_router_logits": True}},
            "must be 1 with a load-balancing loss of experts",
        ),
    ],
)
def test_refusals_are_one_line(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        curve(wide(tmp_path, **{"sequence_parallel_size": 2, **fields}), 2)
