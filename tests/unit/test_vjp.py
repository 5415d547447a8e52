"""Every op's gradient against finite differences in float64, along random directions, at odd shapes."""

import dataclasses
import re

import numpy as np
import pytest

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.emitter import Emitter
from ckdist.program.ops import FILES, op_named
from ckdist.program.program import Program, Value, Weight
from ckdist.program.routing import Routing
from tests.support.cases import cases
from tests.support.interpreter import Interpreter
from tests.support.paths import ROOT
from tests.support.specs import rope, spec

STARTS = np.array([0, 3, 4, 9])
TOKENS = Dim("tokens", None)
RANK = Dim("rank", 2)
HEADS, KV_HEADS, HIDDEN, FFN, VOCAB = (
    Dim("heads", 6, 4),
    Dim("kv_heads", 2, 4),
    Dim("hidden", 5),
    Dim("ffn", 7),
    Dim("vocab", 11),
)
IDS, TARGETS = Value("ids", (TOKENS,), "i32"), Value("targets", (TOKENS,), "i32")
CHOICES = Dim("choices", 2)
TEACHER = Value("teacher_ids", (TOKENS, CHOICES), "i32"), Value("teacher_logprobs", (TOKENS, CHOICES), "given")
EXPERTS = Dim("experts", 4)
CHOSEN = Value("chosen", (TOKENS, Dim("used", 2)), "i32")
INTEGERS = {
    "ids": np.array([3, 0, 10, 3, 3, 7, 1, 0, 9]),
    "targets": np.array([4, -1, 10, 0, 0, -1, 2, 5, -1]),
    "teacher_ids": np.sort(np.stack([np.arange(9), (np.arange(9) * 3 + 1) % 11], 1) % 11),
    "teacher_logprobs": np.log(np.linspace(0.1, 0.45, 18).reshape(9, 2)),
    "chosen": np.array([[0, 1], [3, 0], [1, 0], [3, 1], [0, 3], [1, 3], [0, 1], [3, 0], [1, 0]]),  # none takes 2
}
INTEGERS |= {"norms": np.linspace(0.5, 2, 5), "dropout_keys": np.arange(9, dtype=np.uint32) * 77}
NORMS, KEYS = Value("norms", (HIDDEN,), "given"), Value("dropout_keys", (TOKENS,), "i32")
STEP, DIRECTIONS = 1e-5, 4
ONE, KEYS_OF_STATES = Dim("heads", 6, 1), Dim("kv_heads", 2, 3)
DELTA = {"corrects": True, "l2_eps": 1e-2, "scale": 0.5, "beta_scale": 2.0, "decay_floor": 0.0}


def values(*dims):
    return tuple(Value(f"x.{i}", (TOKENS, dim)) for i, dim in enumerate(dims))


def weight(name, *dims):
    return Weight(name, dims)


CASES = {
    "embed": ("embed", (IDS,), (weight("table", VOCAB, HIDDEN),), {}),
    "scale": ("scale", values(HIDDEN), (), {"factor": 2.5}),
    "scale_queries": ("scale_queries", values(HEADS), (), {"beta": 0.7, "context": 2, "from_one": False}),
    "rms_norm": ("rms_norm", values(HIDDEN), (weight("norm", HIDDEN),), {"eps": 1e-2}),
    "rms_norm per head": ("rms_norm", values(HEADS), (weight("norm", Dim("head_dim", 4)),), {"eps": 1e-6}),
    "linear": ("linear", values(HIDDEN), (weight("w", FFN, HIDDEN), None), {}),
    "linear three": (
        "linear",
        values(HIDDEN),
        (
            weight("q", HEADS, HIDDEN),
            weight("k", KV_HEADS, HIDDEN),
            weight("v", FFN, HIDDEN),
            weight("qb", HEADS),
            None,
            weight("vb", FFN),
        ),
        {},
    ),
    "low_rank": (
        "low_rank",
        values(HIDDEN, HEADS, FFN),
        (weight("qa", RANK, HIDDEN), weight("qb", HEADS, RANK), weight("ga", RANK, HIDDEN), weight("gb", FFN, RANK)),
        {"scale": 1.5},
    ),
    "low_rank with dropout": (
        "low_rank",
        (*values(HIDDEN, HEADS), KEYS),
        (weight("qa", RANK, HIDDEN), weight("qb", HEADS, RANK)),
        {"scale": 1.5, "dropout": 0.4},
    ),
    "magnitude": ("magnitude", (*values(HIDDEN), NORMS), (weight("m", HIDDEN), None), {}),
    "rope": ("rope", values(HEADS), (), {"table": "global"}),
    "rope of a part": ("rope", values(HEADS), (), {"table": "part"}),
    "rope of pairs": ("rope", values(HEADS), (), {"table": "pairs"}),
    "attend_packed": ("attend_packed", values(HEADS, HEADS, HEADS), (), {"scale": 0.5, "soft_cap": 0.0, "window": 0}),
    "attend_packed grouped": (
        "attend_packed",
        values(HEADS, KV_HEADS, KV_HEADS),
        (),
        {"scale": 0.5, "soft_cap": 0.0, "window": 0},
    ),
    "attend_packed window": (
        "attend_packed",
        values(HEADS, KV_HEADS, KV_HEADS),
        (),
        {"scale": 0.7, "soft_cap": 0.8, "window": 2},
    ),
    "attend_packed with sinks": (
        "attend_packed",
        values(HEADS, KV_HEADS, KV_HEADS),
        (weight("sinks", Dim("heads", 6)),),
        {"scale": 0.7, "soft_cap": 0.0, "window": 2},
    ),
    "convolve": (
        "convolve",
        values(HEADS),
        (weight("taps", Dim("heads", 6, 12)), weight("bias", HEADS)),
        {"activates": True},
    ),
    "convolve without bias": ("convolve", values(HEADS), (weight("taps", Dim("heads", 6, 8)),), {"activates": False}),
    "delta_packed": (
        "delta_packed",
        values(KEYS_OF_STATES, KEYS_OF_STATES, HEADS, ONE, ONE),
        (weight("a_log", ONE), weight("dt_bias", ONE)),
        {**DELTA, "tiled": False},
    ),
    "delta_packed by row": (
        "delta_packed",
        values(*[Dim("heads", 6, 3)] * 2, HEADS, Dim("heads", 6, 3), ONE),
        (weight("a_log", ONE), weight("dt_bias", Dim("heads", 6, 3))),
        {**DELTA, "tiled": True, "decay_floor": -2.0},
    ),
    "delta_packed of Mamba-2": (
        "delta_packed",
        values(KEYS_OF_STATES, KEYS_OF_STATES, HEADS, ONE),
        (weight("a_log", ONE), weight("dt_bias", ONE), weight("skip", ONE)),
        {"tiled": False, "corrects": False, "dt_low": 0.3, "dt_high": 1.5},
    ),
    "group_norm": ("group_norm", values(HEADS), (weight("norm", HEADS),), {"groups": 3, "eps": 1e-2}),
    "gated without a function": ("gated", values(FFN, FFN), (), {"function": "identity"}),
    "gated relu": ("gated", values(FFN, FFN), (), {"function": "relu"}),
    "latent_keys": (
        "latent_keys",
        values(Dim("latent", 1, 7)),
        (weight("w", Dim("heads", 6, 5), Dim("nope", 3)),),
        {},
    ),
    "norm_latent": ("norm_latent", values(Dim("latent", 1, 7)), (weight("norm", Dim("kv_lora", 5)),), {"eps": 1e-2}),
    "latent_values": ("latent_values", values(Dim("latent", 1, 7)), (), {"dim": Dim("kv_lora", 5)}),
    "rope of the end": ("rope", values(HEADS), (), {"table": "part", "first": 2}),
    "route": ("route", values(Dim("experts", 6)), (None,), {**dataclasses.asdict(Routing(3)), "shared": False}),
    "route by sigmoids": (
        "route",
        values(Dim("experts", 6)),
        (None,),
        {**dataclasses.asdict(Routing(2, "sigmoid", False, 1.5, groups=3, top_groups=2)), "shared": False},
    ),
    "grouped_experts": (
        "grouped_experts",
        (*values(HIDDEN), CHOSEN, Value("shares", (TOKENS, Dim("shares", 2)))),
        (
            *(weight(name, Dim("experts", 4), FFN, HIDDEN) for name in ("gate", "up")),
            weight("down", Dim("experts", 4), HIDDEN, FFN),
        ),
        {"function": "silu"},
    ),
    "grouped_experts with biases and LoRA": (
        "grouped_experts",
        (*values(HIDDEN), CHOSEN, Value("shares", (TOKENS, Dim("shares", 2)))),
        (
            *(weight(name, EXPERTS, FFN, HIDDEN) for name in ("gate", "up")),
            weight("down", EXPERTS, HIDDEN, FFN),
            *(weight(f"{name}_bias", Dim("experts", 4, size)) for name, size in (("gate", 7), ("up", 7), ("down", 5))),
            *(weight("gate_a", EXPERTS, RANK, HIDDEN), weight("gate_b", EXPERTS, FFN, RANK)),
            *(weight("up_a", EXPERTS, RANK, HIDDEN), weight("up_b", EXPERTS, FFN, RANK)),
            *(weight("down_a", EXPERTS, RANK, FFN), weight("down_b", EXPERTS, HIDDEN, RANK)),
        ),
        {"function": "clamped_swiglu", "biased": True, "adapted": (0, 1, 2), "scale": 1.5},
    ),
    "tally": (
        "tally",
        (TARGETS, Value("x.0", (TOKENS, Dim("experts", 4))), CHOSEN, Value("x.1", (TOKENS, Dim("experts", 4))), CHOSEN),
        (),
        {},
    ),
    "tally behind another": (
        "tally",
        (TARGETS, Value("x.0", (TOKENS, Dim("experts", 4))), CHOSEN, Value("x.1", (Dim("tally", 8),))),
        (),
        {},
    ),
    "balance_loss": (
        "balance_loss",
        (TARGETS, Value("x.0", (Dim("tally", 8),))),
        (),
        {"layers": 3, "coefficient": 1.3},
    ),
    "switched": ("switched", values(HIDDEN, Dim("switch", 1)), (), {}),
    "gated silu": ("gated", values(FFN, FFN), (), {"function": "silu"}),
    "gated and clamped": ("gated", values(FFN, FFN), (), {"function": "clamped_swiglu"}),
    "gated sigmoid": ("gated", values(FFN, FFN), (), {"function": "sigmoid"}),
    "gated heads": ("gated_heads", values(Dim("heads", 3), Dim("heads", 3, 4)), (), {"function": "softplus"}),
    "gated gelu": ("gated", values(FFN, FFN), (), {"function": "gelu_tanh"}),
    "add": ("add", values(FFN, FFN), (), {}),
    "cross_entropy": ("cross_entropy", (*values(HIDDEN), TARGETS), (weight("head", VOCAB, HIDDEN),), {"soft_cap": 0.0}),
    "cross_entropy capped": (
        "cross_entropy",
        (*values(HIDDEN), TARGETS),
        (weight("head", VOCAB, HIDDEN),),
        {"soft_cap": 2.0},
    ),
    "cross_entropy of a teacher": (
        "cross_entropy",
        (*values(HIDDEN), TARGETS, *TEACHER),
        (weight("head", VOCAB, HIDDEN),),
        {"soft_cap": 2.0, "target_weight": 0.3, "teacher_weight": 1.7},
    ),
}
# What else they make carries no gradient: log-sum-exps, and what their own gradients read.
THROUGH_FIRST = ("attend_packed", "cross_entropy", "grouped_experts")


def evaluate(program, arrays, weights, mesh=None):
    """The outputs on one rank, in float64."""
    s = spec(head_dim=4, ropes={"global": rope(4, magnitude=1.3), "part": rope(2), "pairs": rope(4, interleaved=True)})
    interpreter = Interpreter(program, s, mesh or Mesh({"tp": 1}), weights.get, np.float64)
    for context in interpreter.contexts:
        context.starts = STARTS
        context.positions = np.arange(9) - np.repeat(STARTS[:-1], np.diff(STARTS))
    return interpreter.evaluate([[arrays[v.name] for v in program.inputs]])[0]


def gradients(name, wanted=None):
    """(the op's program, the program of the gradients of its operands in order; those not `wanted` left out)."""
    op, inputs, weights, attrs = CASES[name]
    g = Emitter(inputs)
    outputs = g.emit(op, inputs, weights, **attrs)
    cotangents = tuple(None if i and op in THROUGH_FIRST else Value(f"c.{i}", o.dims) for i, o in enumerate(outputs))
    back = Emitter([*inputs, *outputs, *(c for c in cotangents if c)])
    operands = (*inputs, *weights)
    wanted = [o is not None and getattr(o, "dtype", "f32") == "f32" for o in operands] if wanted is None else wanted
    results = op_named(op).vjp(back, g.instrs[0], cotangents, wanted)
    assert len(results) == len(operands)
    forward = Program(inputs, outputs[:1] if op in THROUGH_FIRST else outputs, tuple(g.instrs))
    backward = Program(
        (*inputs, *(c for c in cotangents if c)),
        tuple(r for r, w in zip(results, wanted, strict=True) if w),
        (*g.instrs, *back.instrs),
    )
    return forward, backward, [o for o, w in zip(operands, wanted, strict=True) if w], back.instrs


def numbers(rng, dims):
    return rng.standard_normal([{"tokens": 9, "outputs": 3}.get(d.name) or d.elements for d in dims])


@cases("name", CASES)
def test_gradient(name):
    rng = np.random.default_rng(7)
    forward, backward, operands, _ = gradients(name)
    arrays = {v.name: INTEGERS[v.name] if v.dtype != "f32" else numbers(rng, v.dims) for v in forward.inputs}
    weights = {w.name: numbers(rng, w.dims) for w in forward.weights}
    cotangents = {v.name: numbers(rng, v.dims) for v in backward.inputs if v.name not in arrays}

    def total():
        return sum((o * c).sum() for o, c in zip(evaluate(forward, arrays, weights), cotangents.values(), strict=True))

    results = evaluate(backward, arrays | cotangents, weights)
    for operand, gradient in zip(operands, results, strict=True):
        array = (weights if isinstance(operand, Weight) else arrays)[operand.name]
        assert gradient.shape == array.shape and gradient.dtype == np.float64
        for _ in range(DIRECTIONS):
            before, direction = array.copy(), rng.standard_normal(array.shape)
            array += STEP * direction
            above = total()
            array -= 2 * STEP * direction
            slope = (above - total()) / (2 * STEP)
            array[...] = before
            assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-7, abs=1e-8), (
                f"{name}: gradient by {operand}"
            )


def test_every_op_of_training_is_checked():
    """What has a vjp is in CASES; the collectives are checked in whole programs (test_autodiff)."""
    names = [name for listed in FILES.values() for name in listed.split()]
    assert {name for name in names if op_named(name).vjp} == {case[0] for case in CASES.values()} | {
        "all_reduce",
        "recv",
        "send",
    }
    assert len(names) <= 100


def test_the_table_of_ops_has_every_file_and_its_ops():
    found = {
        path.stem: re.findall(r'^@op\(\s*"(\w+)"', path.read_text(), re.MULTILINE)
        for path in (ROOT / "ckdist/program/ops").glob("*.py")
    }
    assert {file: " ".join(names) for file, names in found.items() if names} == FILES


@pytest.mark.parametrize(
    "wanted, ops",
    [
        ([True] + [False] * 6, ["linear_grad"]),
        ([False, True, False, True, False, False, False], ["linear_weight_grad"]),
        ([False] * 6 + [True], ["bias_grad"]),
    ],
)
def test_only_what_is_wanted_is_computed(wanted, ops):
    rng = np.random.default_rng(3)
    _, some, _, instrs = gradients("linear three", wanted)
    assert [i.op for i in instrs] == ops
    assert len(instrs[0].outputs) == sum(wanted)
    _, every, operands, _ = gradients("linear three")
    arrays = {v.name: numbers(rng, v.dims) for v in every.inputs}
    weights = {w.name: numbers(rng, w.dims) for w in every.weights}
    whole = dict(zip(operands, evaluate(every, arrays, weights), strict=True))
    names = [o for o, w in zip((*CASES["linear three"][1], *CASES["linear three"][2]), wanted, strict=True) if w]
    for operand, found in zip(names, evaluate(some, arrays, weights), strict=True):
        np.testing.assert_array_equal(found, whole[operand])


def test_a_batch_without_targets_has_no_loss_and_no_gradient(monkeypatch):
    monkeypatch.setitem(INTEGERS, "targets", np.full(9, -1))
    rng = np.random.default_rng(1)
    forward, backward, _, _ = gradients("cross_entropy capped")
    arrays = {"x.0": numbers(rng, (TOKENS, HIDDEN)), "targets": INTEGERS["targets"], "c.0": np.float64(1)}
    weights = {"head": numbers(rng, (VOCAB, HIDDEN))}
    assert evaluate(forward, arrays, weights) == [0.0]
    assert not any(gradient.any() for gradient in evaluate(backward, arrays, weights))


def test_what_has_no_gradient_says_so():
    g = Emitter()
    q = values(HEADS, HEADS, HEADS)
    _, lse = g.emit("attend_packed", q, scale=1.0, soft_cap=0.0, window=0)
    with pytest.raises(LayoutError, match="attend_packed has no gradient through its log-sum-exp"):
        op_named("attend_packed").vjp(g, g.instrs[0], (None, lse), [True] * 3)
