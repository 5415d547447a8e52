"""Native training of experts and latent attention against PyTorch: gradients, and losses over steps, on any mesh."""

from dataclasses import replace

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.spec import LatentAttention, LayerSpec, MoeFfn
from ckdist.models.training_loss import loss
from ckdist.program.autodiff import backward
from ckdist.program.pool import ThreadPool
from ckdist.program.routing import Routing
from ckdist.program.training_tracer import trace_loss
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import trainable
from tests.support.golden_training import (
    FLOAT32_ERROR,
    GRADIENT_ERROR,
    LOSS_ERROR,
    AdamW,
    batches,
    golden,
    gradient_errors,
    model,
    split,
)
from tests.support.interpreter import Interpreter
from tests.support.reference_training import ReferenceExecutable
from tests.support.specs import spec as small_spec
from tests.support.specs import weights_of
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable

FAMILIES = ["mixtral", "qwen3moe", "deepseek_v3", "gptoss"]
GATED = ["afmoe", "laguna"]  # attention with a gate for each element, with one for each head
AGAIN = 4  # steps that are computed a second time


@pytest.mark.parametrize(
    "family, recompute",
    [*((family, again) for family in FAMILIES for again in (False, True)), *zip(GATED, (False, True), strict=True)],
)
def test_gradients_of_pytorch(family, recompute):
    (spec, weights), expected = model(family), golden(family)
    e = executable(spec, 64, weights.__getitem__, pool=ThreadPool(2), recompute=recompute)
    assert e.forward_backward(batches(spec.vocab_size)[0]) == pytest.approx(expected["loss"], rel=1e-6)
    errors = gradient_errors(expected, dict(e.gradients))
    assert max(errors.values()) < FLOAT32_ERROR.get(family, 1e-5), errors
    e.close()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "qwen3moe"])
def test_gradients_of_pytorch_in_bfloat16(family, tp):
    """Products in bfloat16 on both sides, within the bounds of dense models. No choice of experts is near another."""
    (spec, weights), expected = model(family), golden(f"{family}_bf16")
    batch = PackedBatch(*(expected[name] for name in ("token_ids", "targets", "starts")))

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=60)
        e = executable(
            spec, 64, weights.__getitem__, dtype="bfloat16", pool=ThreadPool(2), communicator=communicator, tp=tp
        )
        assert e.forward_backward(batch) == pytest.approx(expected["loss"], rel=LOSS_ERROR["bfloat16"])
        found = {name: gradient.copy() for name, gradient in e.gradients.items()}
        communicator.barrier()
        e.close()
        return found

    alike = lambda name: tp == 1 or ".mlp.gate." in name or "layernorm" in name  # the others are sharded
    kept = {name: value for name, value in expected.items() if "/" in name and alike(name.partition("/")[2])}
    for gradients in run_threads(tp, body):
        errors = gradient_errors(kept, {name: g for name, g in gradients.items() if alike(name)})
        assert max(errors.values()) < GRADIENT_ERROR["bfloat16"], errors


@pytest.mark.parametrize(
    "family, dp, tp",
    [
        *((family, 1, 1) for family in FAMILIES),
        *((family, 2, 1) for family in ("deepseek_v3", "gptoss")),
        *((family, 1, 2) for family in ("mixtral", "qwen3moe")),  # a shard has 32 columns of an expert or more
    ],
)
def test_losses_of_pytorch_over_steps(family, dp, tp):
    """And a second time for a few steps, to the same bits."""
    spec, weights = model(family)
    expected = golden(family)["losses"]

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=60)
        found = []
        for steps in (len(expected), AGAIN):
            e = executable(spec, 64, weights.__getitem__, pool=ThreadPool(2), communicator=communicator, tp=tp)
            optimizer, losses = AdamW(dict(e.parameters)), []
            for number in range(steps):
                if number == AGAIN - 1:
                    before_last = e.parameters.flat.copy()
                batch = batches()[number % len(batches())]
                e.zero_grad()
                losses.append(e.forward_backward(split(batch, dp)[e.ranks.mesh.index("dp")]))
                targets = np.float32(np.count_nonzero(batch.targets >= 0))
                optimizer.step({name: gradient / targets for name, gradient in e.gradients.items()})
            found.append((losses, before_last))
            communicator.barrier()
            e.close()
        assert found[0][0][:AGAIN] == found[1][0] and np.array_equal(found[0][1], found[1][1])
        return found[0][0]

    replicas = run_threads(dp * tp, body)[::tp]
    targets = [np.count_nonzero(b.targets >= 0) for b in batches()]
    means = [sum(of) / targets[n % len(targets)] for n, of in enumerate(zip(*replicas, strict=True))]
    np.testing.assert_allclose(means, expected, rtol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "qwen3moe"])
def test_the_loss_that_balances_experts(family, tp):
    """Beside the loss of tokens, over all layers; with its part of the gradients of routers and of what is before."""
    (spec, weights), expected = model(family), golden(f"{family}_balanced")
    spec, batch = replace(spec, balance_coefficient=float(expected["coefficient"])), batches()[0]

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=60)
        e = executable(spec, 64, weights.__getitem__, pool=ThreadPool(2), communicator=communicator, tp=tp)
        assert e.forward_backward(batch) == pytest.approx(expected["loss"], rel=1e-6)
        assert e.balance / np.count_nonzero(batch.targets >= 0) == pytest.approx(expected["balance"], rel=1e-6)
        gradients, first = {name: g.copy() for name, g in e.gradients.items()}, e.gradients.flat.copy()
        assert e.loss(batch) == pytest.approx(expected["loss"], rel=1e-6)
        e.zero_grad()
        e.forward_backward(batch)
        assert np.array_equal(e.gradients.flat, first)
        communicator.barrier()
        e.close()
        return gradients

    names = {name.removeprefix("norm/") for name in expected if name.startswith("norm/")}
    routers = {name for name in names if ".mlp.gate." in name}
    for gradients in run_threads(tp, body):  # the embeddings are sharded over tp
        kept = names if tp == 1 else routers
        of = {key: value for key, value in expected.items() if key.partition("/")[2] in kept}
        errors = gradient_errors(of, {name: gradients[name] for name in kept})
        assert max(errors.values()) < 1e-5, errors


def test_the_definition_of_the_loss_that_balances():
    (spec, weights), expected = model("mixtral"), golden("mixtral_balanced")
    spec = replace(spec, balance_coefficient=float(expected["coefficient"]))
    program = trace_loss(loss, spec, SINGLE, Mesh({"dp": 1}))
    e = ReferenceExecutable(program, spec, trainable(program), weights.__getitem__)
    assert e.forward_backward(batches()[0], reduce=False) == pytest.approx(expected["loss"], rel=1e-5)
    assert e.loss(batches()[0]) == pytest.approx(expected["loss"], rel=1e-5)
    assert e.balance / np.count_nonzero(batches()[0].targets >= 0) == pytest.approx(expected["balance"], rel=1e-5)


def test_frozen_experts_are_read_at_every_step():
    """Their pages stay, and gradients flow through them."""
    spec, weights = model("mixtral")
    whole, part = (
        executable(spec, 64, weights.__getitem__, trained=trained)
        for trained in (None, ["model.layers.0.self_attn.q_proj.weight"])
    )
    for _ in range(2):
        for e in (whole, part):
            e.zero_grad()
            e.forward_backward(batches()[1])
        np.testing.assert_allclose(
            part.gradients.flat, whole.gradients["model.layers.0.self_attn.q_proj.weight"].ravel(), atol=1e-5
        )
    whole.close(), part.close()


def test_experts_that_nobody_takes_have_no_gradient():
    """Where another batch left one: it is overwritten."""
    spec, weights = model("qwen3moe")
    sparse = replace(batches()[0], token_ids=np.full(64, 5, np.int32))
    e = executable(spec, 64, weights.__getitem__)
    e.forward_backward(batches()[0])
    e.zero_grad()
    e.forward_backward(sparse)
    empty = executable(spec, 64, weights.__getitem__)
    empty.forward_backward(sparse)
    assert np.array_equal(e.gradients.flat, empty.gradients.flat)
    name = next(n for n in e.gradients if ".experts.gate_proj" in n)
    assert any(not np.any(matrix) for matrix in e.gradients[name]) and np.any(e.gradients[name])
    e.close(), empty.close()


@pytest.fixture(scope="module")
def large_items():
    """(spec, weights, batch, expected): the loss and gradients of some large sizes in float64."""
    latent = LatentAttention(3, 300, 40, 16, 24, 0.2)
    experts = MoeFfn(3, 450, Routing(3), shared_size=96)
    spec = replace(small_spec(vocab=90), layers=(LayerSpec(latent, experts),), hidden_size=420)
    program = trace_loss(loss, spec, SINGLE, Mesh({"dp": 1}))
    weights = {name: 0.5 * w for name, w in weights_of(program).items()}
    rng = np.random.default_rng(0)
    ids, targets = (rng.integers(0, 90, 1100).astype(np.int32) for _ in range(2))
    batch = PackedBatch(ids, targets, np.array([0, 700, 1100], np.int32))
    gradients = backward(program, program.outputs[0], trainable(program))
    mesh = Mesh({"dp": 1})
    total, *expected = Interpreter(gradients, spec, mesh, weights.__getitem__, np.float64).run_packed([batch])[0]
    names = (weight.name for weight in trainable(program))
    return spec, weights, batch, (total, dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_of_several_items(large_items, dtype):
    """More tokens of an expert than are multiplied, or summed, at a time; wider matrices than an item packs."""
    spec, weights, batch, (total, expected) = large_items
    e = executable(spec, 1100, weights.__getitem__, dtype=dtype, pool=ThreadPool(2))
    assert e.forward_backward(batch) == pytest.approx(total, rel={"float32": 1e-6, "bfloat16": 2e-3}[dtype])
    for name, gradient in expected.items():
        error = np.linalg.norm(e.gradients[name] - gradient) / np.linalg.norm(gradient)
        assert error < {"float32": 1e-5, "bfloat16": 0.05}[dtype], (name, error)
    first = e.gradients.flat.copy()
    e.zero_grad()
    e.forward_backward(batch)
    assert np.array_equal(e.gradients.flat, first)
    e.forward_backward(batch)
    np.testing.assert_allclose(e.gradients.flat, 2 * first, rtol=1e-4, atol=1e-5 * np.abs(first).max())
    e.close()
