"""Backward of whole models: against PyTorch's gradients and steps, over any number of ranks, packed or not, run
again or kept.
"""

import numpy as np
import pytest

from ckdist.errors import LayoutError
from ckdist.layout import DATA, SINGLE, TRAINING, Dim, Layout
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.models.training_loss import loss
from ckdist.program.autodiff import backward
from ckdist.program.pipeline_stage import Stage
from ckdist.program.program import Weight
from ckdist.program.tracer import trace
from ckdist.program.training_tracer import trace_loss
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import trainable
from tests.support import golden_training
from tests.support.golden_training import AdamW, gradient_errors, split
from tests.support.interpreter import Interpreter
from tests.support.paths import GOLDEN as GOLDEN_FILES
from tests.support.specs import FAMILIES, PIECES, dims, spec

GOLDEN = GOLDEN_FILES / "programs"
HEADS_AND_FFN = Layout("HEADS_AND_FFN", {"heads": "tp", "kv_heads": "tp", "ffn": "tp"})
TINY = {"heads": 6, "kv_heads": 3, "head_dim": 4, "ffn": 70, "vocab": 30}
ALONE = Mesh({"dp": 1})


def step(s, weights, batches, layout=DATA, mesh=None, wrt=None, dtype=np.float32, **more):
    """(loss, every rank's gradients by name) of one batch per rank."""
    mesh = mesh or Mesh({"dp": len(batches)})
    program = trace_loss(loss, s, layout, mesh)
    trained = [w for w in program.weights if wrt is None or w.name in wrt]
    both = Interpreter(backward(program, program.outputs[0], trained, **more), s, mesh, weights.get, dtype)
    both = both.run_packed(batches)
    assert len({float(total) for total, *_ in both}) == 1  # the loss is whole on every rank
    return both[0][0], [dict(zip((w.name for w in trained), gradients, strict=True)) for _, *gradients in both]


def random_batch(lengths=(5, 1, 7), vocab=30, seed=2):
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    targets = rng.integers(-1, vocab, tokens).astype(np.int32)
    return PackedBatch(
        rng.integers(0, vocab, tokens).astype(np.int32), targets, np.cumsum([0, *lengths]).astype(np.int32)
    )


def tiny(family, **more):
    s = spec(**FAMILIES[family], **{**TINY, **more})
    rng = np.random.default_rng(4)
    shapes = {w.name: [d.elements for d in w.dims] for w in trace_loss(loss, s, DATA, ALONE).weights}
    return s, {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def assert_same(found, expected, rtol=1e-5):
    """Gradients by name, to a relative error of their norms."""
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= rtol * np.linalg.norm(gradient), name


@pytest.mark.parametrize("family", [*golden_training.FAMILIES, *golden_training.FLOAT32_ERROR])
def test_gradients_and_steps_agree_with_pytorch(family):
    """The gradient by every weight, to 1e-5 in float32; and the loss before a step of AdamW with each batch, in float64
    as PyTorch's: rounding grows with the steps (AdamW divides a gradient by its size), so a curve in float32 says which
    BLAS computed it. All 20 steps are those of `test_the_loss_curve_is_the_same_over_ranks`.
    """
    golden, (s, weights) = golden_training.golden(family), golden_training.model(family)
    precise = {name: weight.astype(np.float64) for name, weight in weights.items()}
    batches, optimizer, losses = golden_training.batches(s.vocab_size), AdamW(precise), []
    program = trace_loss(loss, s, DATA, ALONE)
    names, program = [w.name for w in trainable(program)], backward(program, program.outputs[0], trainable(program))
    for number, batch in enumerate(batches):
        if number == 0:
            # the angles of rotations are float32 in both
            in_float32 = golden_training.FLOAT32_ERROR.get(family, 1e-5)
            for dtype, tolerance in ((np.float64, 3e-6), (np.float32, in_float32)):
                ((total, *gradients),) = Interpreter(program, s, ALONE, weights.get, dtype).run_packed([batch])
                assert total == pytest.approx(golden["loss"], rel=tolerance)
                errors = gradient_errors(golden, dict(zip(names, gradients, strict=True)))
                assert max(errors.values()) < tolerance, errors
        ((total, *gradients),) = Interpreter(program, s, ALONE, precise.get, np.float64).run_packed([batch])
        targets = np.count_nonzero(batch.targets >= 0)
        losses.append(total / targets)
        optimizer.step({name: gradient / targets for name, gradient in zip(names, gradients, strict=True)})
    np.testing.assert_allclose(losses, golden["losses"][: len(batches)], rtol=3e-6)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cut_of_a_batch_does_not_matter(family, ranks):
    """Ranks with different numbers of sequences, tokens and targets; every rank has the whole gradient."""
    s, weights = tiny(family)
    batch = random_batch((5, 1, 7, 4, 2))
    expected, (alone,) = step(s, weights, [batch])
    total, gradients = step(s, weights, split(batch, ranks))
    assert total == pytest.approx(expected, rel=1e-6)
    for own in gradients:
        assert_same(own, alone)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_loss_curve_is_the_same_over_ranks(ranks):
    golden, (s, weights) = golden_training.golden("qwen3"), golden_training.model("qwen3")
    weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
    batches, optimizer, losses = golden_training.batches(), AdamW(weights), []
    for number in range(len(golden["losses"])):
        batch = batches[number % len(batches)]
        total, gradients = step(s, weights, split(batch, ranks), dtype=np.float64)
        targets = np.count_nonzero(batch.targets >= 0)
        losses.append(total / targets)
        optimizer.step({name: gradient / targets for name, gradient in gradients[0].items()})
    np.testing.assert_allclose(losses, golden["losses"], rtol=3e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_equal_separate_ones(family):
    s, weights = tiny(family)
    batch = random_batch()
    total, (packed,) = step(s, weights, [batch])
    separate = [step(s, weights, [part]) for part in split(batch, len(batch.starts) - 1)]
    assert total == pytest.approx(sum(part for part, _ in separate), rel=1e-6)
    assert_same(packed, {name: sum(gradients[0][name] for _, gradients in separate) for name in packed})


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_that_run_again_give_the_same_bits(family):
    s, weights = tiny(family)
    batches = split(random_batch(), 2)
    expected, kept = step(s, weights, batches)
    total, again = step(s, weights, batches, recompute=True)
    assert total == expected
    for name, gradient in kept[0].items():
        np.testing.assert_array_equal(again[0][name], gradient)


def test_recompute_keeps_boundaries_alone():
    """No gradient reads what the forward of an earlier block made, but for its input; the last block is not run
    again.
    """
    s, _ = tiny("llama")
    program = trace_loss(loss, s, DATA, ALONE)
    plain, again = (backward(program, program.outputs[0], program.weights, recompute=r) for r in (False, True))
    made = {
        o
        for i in program.instrs[
            : program.instrs.index(next(i for i in program.instrs if program.boundaries[1] in i.outputs)) + 1
        ]
        for o in i.outputs
    }
    seed = next(n for n, i in enumerate(again.instrs) if i.op == "one")
    assert {v for i in again.instrs[seed:] for v in i.inputs} & made <= set(program.boundaries)
    count = lambda p: sum(i.op == "attend_packed" for i in p.instrs)
    assert (count(plain), count(again)) == (len(s.layers), 2 * len(s.layers) - 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_cut(family, ranks):
    """Heads and ffn sharded: each rank has its part of the gradients, and what is whole is whole."""
    s, weights = tiny(family)
    batch, mesh = random_batch(), Mesh({"tp": ranks})
    expected, (alone,) = step(s, weights, [batch])
    total, parts = step(s, weights, [batch] * ranks, HEADS_AND_FFN, mesh)
    assert total == pytest.approx(expected, rel=1e-5)
    declared = {w.name: w for w in trace_loss(loss, s, HEADS_AND_FFN, mesh).weights}
    for rank, own in enumerate(parts):
        for name, gradient in own.items():
            whole = alone[name]
            for axis, dim in enumerate(declared[name].dims):
                begin, end = dim.share(Mesh({"tp": ranks}, rank))
                whole = whole.take(range(begin * dim.width, end * dim.width), axis=axis)
            assert gradient.shape == whole.shape
            np.testing.assert_allclose(gradient, whole, atol=1e-5 * np.abs(alone[name]).max(), err_msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dp, tp", [(2, 3), (3, 1), (1, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_tensors_cut_at_once(family, dp, tp, recompute):
    """Batches over dp, heads, ffn and vocabulary over tp: every rank has its part of one rank's gradients. Those of
    norms per head are summed over both.
    """
    s, weights = tiny(family)
    batch, mesh = random_batch((5, 1, 7, 4, 2)), Mesh.of_job(dp * tp, 0, tp=tp)
    expected, (alone,) = step(s, weights, [batch])
    parts = split(batch, dp)
    total, found = step(s, weights, [parts[r // tp] for r in range(dp * tp)], TRAINING, mesh, recompute=recompute)
    assert total == pytest.approx(expected, rel=1e-5)
    declared = {w.name: w for w in trace_loss(loss, s, TRAINING, mesh).weights}
    for rank, own in enumerate(found):
        for name, gradient in own.items():
            spans = tuple(slice(*dim.span(Mesh(mesh.axes, rank))) for dim in declared[name].dims)
            np.testing.assert_allclose(
                gradient, alone[name][spans], atol=1e-5 * np.abs(alone[name]).max(), err_msg=name
            )


def test_a_norm_over_heads_that_ranks_share_is_refused():
    with pytest.raises(LayoutError, match=r"rms_norm needs all of heads, but %q.0 has it sharded over tp"):
        trace_loss(loss, spec(**PIECES["norms_after"]), TRAINING, Mesh.of_job(2, 0, tp=2))


def test_only_what_the_trained_weights_need_is_computed():
    """Frozen weights have no gradient, values below the first trained weight none either; those between pass it
    through.
    """
    s, weights = tiny("llama")
    trained = ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"]
    batch = random_batch()
    _, (some,) = step(s, weights, [batch], wrt=trained)
    _, (every,) = step(s, weights, [batch])
    for name in trained:
        np.testing.assert_array_equal(some[name], every[name])
    program = trace_loss(loss, s, DATA, ALONE)
    text = str(backward(program, program.outputs[0], [w for w in program.weights if w.name in trained]))
    assert text.count("linear_weight_grad(") == 1 and "weight_grad=True" not in text and "embed_grad" not in text
    assert text.count("attend_grad") == 1 and "@model.layers.0" not in text[text.index("one()") :]
    assert text.count(" rope_grad(") == 1  # of k nothing is wanted


def test_errors_name_the_op():
    s = spec(**TINY)
    program = trace(forward, s, SINGLE, Mesh({"tp": 1}))
    with pytest.raises(LayoutError, match=r"backward needs a loss that is one whole number, but it is %logits.0"):
        backward(program, program.outputs[0], program.weights)
    program = trace_loss(loss, s, DATA, ALONE)
    other = Weight("model.layers.9.up", (Dim("hidden", 64),))
    with pytest.raises(LayoutError, match=r"does not depend on @model.layers.9.up"):
        backward(program, program.outputs[0], [other])
    shared = spec(heads=6, kv_heads=2, head_dim=4)
    program = trace_loss(loss, shared, HEADS_AND_FFN, Mesh({"tp": 3}))
    with pytest.raises(LayoutError, match=r"attend_grad: 2 kv_heads sharded over tp are shared.*at most 2 ranks"):
        backward(program, program.outputs[0], program.weights)


def test_a_cache_is_not_trained_through():
    def serves(g, ids, targets, s):
        d = dims(g, s)
        x = g.embed(ids, g.weight("table", d["vocab"], d["hidden"]))
        q, k, v = (
            g.linear(x, g.weight(name, d[dim], d["hidden"]))
            for name, dim in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
        )
        (o,) = g.emit("attend", (q, k, v), layer=0, scale=1.0, soft_cap=0.0, window=0)
        o = g.linear(o, g.weight("o", d["hidden"], d["heads"]))
        return g.cross_entropy(o, targets, g.weight("head", d["vocab"], d["hidden"]), 0.0)

    program = trace_loss(serves, spec(), SINGLE, ALONE)
    with pytest.raises(LayoutError, match="attend has no gradient"):
        backward(program, program.outputs[0], program.weights)


@pytest.mark.parametrize(
    "name, layout, mesh, recompute",
    [("gemma2", DATA, Mesh({"dp": 2}), False), ("qwen2", HEADS_AND_FFN, Mesh({"tp": 2}), True)],
)
def test_golden_text(name, layout, mesh, recompute):
    """What a review sees when a gradient, a placement rule or the order changes.

    Delete the file and run again to make it anew.
    """
    program = trace_loss(loss, spec(**FAMILIES[name]), layout, mesh)
    text = str(backward(program, program.outputs[0], program.weights, recompute))
    path = GOLDEN / f"{name}_backward.txt"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path.name} did not exist and was written: look at it and commit it")
    assert text == path.read_text()


def test_an_all_reduce_follows_its_gradient_at_once():
    """So that it overlaps what remains: between a weight's last contribution and its sum there is only the same op's
    other output.
    """
    program = trace_loss(loss, spec(**FAMILIES["gemma2"]), DATA, Mesh({"dp": 2}))
    both = backward(program, program.outputs[0], program.weights)
    made = {o: n for n, i in enumerate(both.instrs) for o in i.outputs}
    sums = [(n, i) for n, i in enumerate(both.instrs) if i.op == "all_reduce"]
    assert len(sums) == 1 + len(program.weights)
    for n, instr in sums:
        between = {i.op for i in both.instrs[made[instr.inputs[0]] + 1 : n]}
        assert between <= {"bias_grad", "linear_grad", "all_reduce"}, str(instr)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}])
def test_stages_give_the_gradients_of_the_whole(family, axes, recompute):
    """Of one layer each: what a stage sends is what the next one receives, and its gradient what comes back."""
    (s, weights), mesh = tiny(family), Mesh(axes)
    batches = [batch for batch in split(random_batch(), axes["dp"]) for _ in range(axes["tp"])]
    whole = trace_loss(loss, s, TRAINING, mesh)
    expected = {}
    total, *gradients = Interpreter(
        backward(whole, whole.outputs[0], trainable(whole)), s, mesh, weights.get
    ).run_packed(batches)[0]
    expected = dict(zip((w.name for w in trainable(whole)), gradients, strict=True))
    programs = [Stage(n, 2, (n, n + 1)).program(whole, mesh) for n in range(2)]
    wrt = [[w for w in trainable(whole) if w in program.weights] for program in programs]
    both = [backward(program, program.outputs[0], own, recompute) for program, own in zip(programs, wrt, strict=True)]

    def run(program, received: dict[int, list[list[np.ndarray]]]):
        """The outputs of every rank, of whom each received its own rows."""
        interpreter = Interpreter(program, s, mesh, weights.get)
        for rank, context in enumerate(interpreter.contexts):
            context.received = {stage: values[rank] for stage, values in received.items()}
        return interpreter.run_packed(batches)

    sent = run(programs[0], {})
    last = run(both[1], {0: sent})
    first = run(both[0], {1: [outputs[-len(sent[0]) :] for outputs in last]})
    assert last[0][0] == pytest.approx(total, rel=1e-6)
    found = {}
    for own, (_, *gradients) in zip(wrt, (first[0], last[0]), strict=True):
        for weight, gradient in zip(own, gradients, strict=False):
            found[weight.name] = found.get(weight.name, 0) + gradient
    assert_same(found, expected)
