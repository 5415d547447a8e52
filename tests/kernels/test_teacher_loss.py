"""The divergence from a teacher beside PyTorch: losses and gradients, natively on one and two ranks."""

import functools

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.program.training_tracer import TeacherLoss, TrainingTracer
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import lower_model, trace_model, trainable
from tests.support.golden_training import batches, gradient_errors, model
from tests.support.paths import GOLDEN
from tests.support.reference_training import ReferenceExecutable
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable

CASES = {
    "all": ("llama3", 1.0, 1.0),
    "part": ("llama3", 0.6, 1.0),
    "warm": ("llama3", 0.6, 2.0),
    "alone": ("llama3", 1.0, 2.0),
    "capped": ("gemma2", 0.6, 1.0),
}


def golden(case: str) -> tuple[dict[str, np.ndarray], PackedBatch]:
    with np.load(GOLDEN / "teacher.npz") as stored:
        found = {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{case}/")}
    batch = batches()[0]
    return found, PackedBatch(
        batch.token_ids, batch.targets, batch.starts, teacher=(found.pop("ids"), found.pop("logprobs"))
    )


def tracer(case: str):
    _, weight, temperature = CASES[case]
    return functools.partial(TrainingTracer, teacher=TeacherLoss(8, temperature, weight))


def check(e, expected: dict[str, np.ndarray], batch: PackedBatch) -> None:
    loss = e.forward_backward(batch, True)
    assert loss == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert e.loss(batch) == pytest.approx(loss, rel=1e-6)
    shown = {name.partition("/")[2]: e.gradients[name.partition("/")[2]] for name in expected if "/" in name}
    assert max(gradient_errors(expected, shown).values()) < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_pytorch(case):
    expected, batch = golden(case)
    spec, weights = model(CASES[case][0])
    e = executable(spec, 64, weights.__getitem__, tracer=tracer(case))
    e.zero_grad()
    check(e, expected, batch)
    e.close()


def test_the_reference_is_the_same():
    expected, batch = golden("warm")
    spec, weights = model("llama3")
    program = trace_model(spec, Mesh({"dp": 1}), tracer("warm"))
    check(ReferenceExecutable(program, spec, trainable(program), weights.__getitem__), expected, batch)


def test_a_sharded_vocabulary_changes_nothing():
    expected, batch = golden("part")
    spec, weights = model("llama3")

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=30)
        e = executable(spec, 64, weights.__getitem__, communicator=communicator, tp=2, tracer=tracer("part"))
        e.zero_grad()
        loss = e.forward_backward(batch, True)
        norm = e.gradients["model.norm.weight"].copy()
        e.close()
        return loss, norm

    for loss, norm in run_threads(2, body):
        assert loss == pytest.approx(float(expected["loss"]), rel=1e-5)
        np.testing.assert_allclose(norm, expected["rows/model.norm.weight"], rtol=1e-3, atol=1e-3)


def test_refusals():
    spec, weights = model("gemma2")
    with pytest.raises(ConfigError, match="temperature 2 cannot teach a model with soft-capped logits"):
        lower_model(spec, 64, tracer=functools.partial(TrainingTracer, teacher=TeacherLoss(8, 2.0, 1.0)))
    _, batch = golden("capped")
    assert batch.teacher is not None
    e = executable(spec, 64, weights.__getitem__, tracer=tracer("capped"))
    wrong = PackedBatch(
        batch.token_ids, batch.targets, batch.starts, teacher=(batch.teacher[0][:, ::-1], batch.teacher[1])
    )
    with pytest.raises(ConfigError, match=r"a teacher's token 1?[0-9]* is out of order"):
        e.loss(wrong)
    e.close()


def test_the_best_token_has_the_smallest_loss():
    spec, weights = model("llama3")
    batch = batches()[0]
    ids, starts = batch.token_ids[:12], np.array([0, 5, 12], np.int32)
    wanted = np.where(np.isin(np.arange(12), (1, 4, 11)), 0, -1).astype(np.int32)

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=30) if world.size > 1 else None
        e = executable(spec, 64, weights.__getitem__, communicator=communicator, tp=world.size)
        best = e.best_tokens(PackedBatch(ids, wanted, starts))
        losses = [
            e.token_losses(PackedBatch(ids, np.where(wanted < 0, -1, token), starts))
            for token in range(spec.vocab_size)
        ]
        e.close()
        return best, np.array(losses)

    for best, losses in (*run_threads(1, body), *run_threads(2, body)):
        np.testing.assert_array_equal(best, np.where(wanted < 0, -1, losses.argmin(0)))
