"""The native replay of training against the program's definition in float64 and golden losses; and against itself,
over threads and ranks.
"""

import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.errors import ConfigError
from ckdist.layout import DATA
from ckdist.mesh import Mesh
from ckdist.models.spec import MoeFfn
from ckdist.models.training_loss import loss as loss_of
from ckdist.program.autodiff import backward
from ckdist.program.pool import ThreadPool
from ckdist.program.routing import Routing
from ckdist.program.training_tracer import trace_loss
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import lower_model, trainable
from ckdist.train.moments import state_floats
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.optimizer import STATES
from ckdist.train.training_memory import training_bytes
from tests.support.cases import cases
from tests.support.golden_training import FAMILIES, GRADIENT_ERROR, LOSS_ERROR, batches, golden, model, split
from tests.support.interpreter import Interpreter
from tests.support.levels import HERE, each
from tests.support.pairs import pairs
from tests.support.specs import LINEAR, PIECES
from tests.support.specs import spec as small_spec
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable


def reference(spec, weights, batch):
    """Loss and gradients in float64."""
    mesh = Mesh({"dp": 1})
    program = trace_loss(loss_of, spec, DATA, mesh)
    gradients = backward(program, program.outputs[0], trainable(program))
    loss, *values = Interpreter(gradients, spec, mesh, weights.__getitem__, np.float64).run_packed([batch])[0]
    return loss, dict(zip((w.name for w in trainable(program)), values, strict=True))


def without_choice(spec, dtype):
    """In bfloat16 every token takes all experts: which it takes of two that are alike is a matter of rounding."""
    if dtype == "float32":
        return spec
    every = lambda f: replace(f, routing=replace(f.routing, used=f.num_experts, groups=1, top_groups=1))
    return replace(
        spec,
        layers=tuple(replace(x, ffn=every(x.ffn)) if isinstance(x.ffn, MoeFfn) else x for x in spec.layers),
    )


def errors(gradients, expected) -> dict[str, float]:
    assert set(gradients) == set(expected)
    # what should be 0, as where a query sees one key, is noise
    floor = 0.05 * max(np.linalg.norm(e) for e in expected.values())
    return {name: np.linalg.norm(gradients[name] - e) / max(np.linalg.norm(e), floor) for name, e in expected.items()}


def check_types(spec, weights, batch, **more) -> None:
    """`check` of both types, against one reference if their models are the same."""
    expected = reference(spec, weights, batch)
    check(spec, weights, batch, "float32", expected, **more)
    check(spec, weights, batch, "bfloat16", expected if without_choice(spec, "bfloat16") == spec else None, **more)


def check(spec, weights, batch, dtype="float32", expected=None, **more) -> None:
    """`expected`: the loss and the gradients in float64, if they are known."""
    spec = without_choice(spec, dtype)
    loss, gradients = expected or reference(spec, weights, batch)
    e = executable(spec, len(batch.token_ids), weights.__getitem__, dtype=dtype, pool=ThreadPool(2), **more)
    assert e.forward_backward(batch) == pytest.approx(loss, rel=LOSS_ERROR[dtype])
    assert e.loss(batch) == pytest.approx(loss, rel=LOSS_ERROR[dtype])
    found = errors(e.gradients, gradients)
    assert max(found.values()) < GRADIENT_ERROR[dtype], found
    e.close()


def random_model(seed=0, hidden=29, **more):
    """(spec, weights) of odd shapes: nothing in them is a multiple of a tile."""
    rng = np.random.default_rng(seed)
    more["mixer"] = {"qkv_bias": True, **more.get("mixer", {})}
    spec = replace(small_spec(heads=6, kv_heads=2, head_dim=12, ffn=37, vocab=51, **more), hidden_size=hidden)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    shape = lambda w: [d.elements for d in w.dims]
    weights = {
        w.name: (0.3 * rng.standard_normal(shape(w)) + (len(w.dims) == 1)).astype(np.float32) for w in program.weights
    }
    return spec, weights


def random_batch(lengths, vocab, seed=1, targets=0.8) -> PackedBatch:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    chosen = np.where(rng.random(n) < targets, rng.integers(0, vocab, n), -1)
    return PackedBatch(
        rng.integers(0, vocab, n).astype(np.int32), chosen.astype(np.int32), np.cumsum([0, *lengths]).astype(np.int32)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_models(family):
    spec, weights = model(family)
    batch = batches(spec.vocab_size)[0]
    expected = reference(spec, weights, batch)
    assert expected[0] == pytest.approx(float(golden(family)["loss"]), rel=1e-5)
    for dtype in ("float32", "bfloat16"):
        check(spec, weights, batch, dtype, expected if without_choice(spec, dtype) == spec else None)


@pytest.mark.parametrize("lengths", [[3, 1, 40], [150], [131, 17]])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"changes": ({"window": 21}, {}), "mixer": {"soft_cap": 3.0}, "logit_soft_cap": 4.0},
        *(PIECES[name] for name in ("norms_after", "multipliers", "no_rope", "norms_rotated", "experts_in_groups")),
        {"layer": {"ffn": MoeFfn(5, 21, Routing(2), "gelu_tanh")}},
    ],
)
def test_odd_shapes(lengths, more):
    spec, weights = random_model(**more)
    check_types(spec, weights, random_batch(lengths, 51), recompute=bool(more))


@pytest.mark.parametrize("piece", [PIECES["unequal"], LINEAR["latent"]])
def test_layers_that_differ(piece):
    """In heads, in the widths of keys and values, and in the feed-forward; some have latent attention."""
    spec = small_spec(**piece)
    rng = np.random.default_rng(3)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {w.name: 0.2 * rng.standard_normal([d.elements for d in w.dims]) for w in program.weights}
    batch = random_batch([40, 23], spec.vocab_size)
    expected = reference(spec, weights, batch)
    for dtype in ("float32", "bfloat16"):
        for recompute in (False, True):
            check(spec, weights, batch, dtype, expected, recompute=recompute)


def test_logits_in_chunks():
    spec = replace(
        small_spec(heads=1, kv_heads=1, head_dim=4, ffn=5, vocab=131_090, changes=({},)),
        hidden_size=6,
        tie_embeddings=True,
    )
    rng = np.random.default_rng(0)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {w.name: rng.standard_normal([d.elements for d in w.dims]).astype(np.float32) for w in program.weights}
    check(spec, weights, random_batch([70, 63], spec.vocab_size, targets=0.2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{"mixer": {"soft_cap": 3.0}}, {"layer": {"ffn": MoeFfn(7, 100, Routing(3))}}])
def test_threads_and_repetition_change_no_bit(dtype, more):
    spec, weights = random_model(**more)
    batch = random_batch([131, 17, 30], 51)
    results = []
    for threads in (1, 2, 3):
        e = executable(spec, 200, weights.__getitem__, dtype=dtype, pool=ThreadPool(threads))
        for _ in range(2):
            e.zero_grad()
            results.append((e.forward_backward(batch), e.gradients.flat.copy()))
        # with empty sequences
        e.forward_backward(replace(batch, starts=np.array([0, 0, 131, 148, 148, 178])), reduce=False)
        assert np.allclose(e.gradients.flat, 2 * results[-1][1], rtol=1e-5, atol=1e-6)  # gradients are added
        e.close()
    for loss, gradients in results[1:]:
        assert loss == results[0][0] and np.array_equal(gradients, results[0][1])


ON_A_LEVEL = """
import sys
import numpy as np
from tests.kernels.test_native_training import ThreadPool, executable, random_batch, random_model
found = {}
for dtype, hidden in ("float32", 29), ("bfloat16", 29), ("float32", 420):
    spec, weights = random_model(hidden=hidden, mixer={"soft_cap": 3.0})
    e = executable(spec, 541, weights.__getitem__, dtype=dtype, pool=ThreadPool(2))
    loss = e.forward_backward(random_batch([131, 410], 51))
    found[f"{dtype} {hidden}"] = np.append(e.gradients.flat.astype(np.float64), loss)
np.savez(sys.argv[1], **found)
"""


@functools.cache
def on_level(isa):
    """Gradients and, last, the loss of models of odd shapes, in a process that has this level's instructions alone.

    The keys are the type and the hidden size.
    """
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        subprocess.run(
            [sys.executable, "-c", ON_A_LEVEL, file.name],
            env={**os.environ, "CKDIST_ISA": isa},
            check=True,
            timeout=120,
        )
        with np.load(file.name) as stored:
            return dict(stored)


@cases("isa, dtype", product(each(("avx2", "avx512", "avx512_bf16")), ["float32", "bfloat16"]))
def test_levels(isa, dtype):
    plain, found = on_level("baseline")[f"{dtype} 29"], on_level(isa)[f"{dtype} 29"]
    same_order = isa == "avx512" or (isa == "avx512_bf16" and dtype == "float32")  # of sums, as on AVX2
    if same_order and "avx2" in HERE:
        np.testing.assert_array_equal(found, on_level("avx2")[f"{dtype} 29"])
    assert found[-1] == pytest.approx(plain[-1], rel=LOSS_ERROR[dtype])
    assert np.linalg.norm(found - plain) / np.linalg.norm(plain[:-1]) < GRADIENT_ERROR[dtype]


@pytest.mark.parametrize("isa", each(("avx2",)))
def test_levels_of_many_tiles(isa):
    """Parts of a gradient's columns, whose tiles are no multiple of those that a product takes at once."""
    plain, found = (on_level(level)["float32 420"] for level in ("baseline", isa))
    assert np.linalg.norm(found - plain) / np.linalg.norm(plain[:-1]) < GRADIENT_ERROR["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_without_a_target_change_no_bit(dtype):
    spec, weights = random_model()
    batch = random_batch([40, 23], 51, targets=0.3)
    e = executable(spec, 150, weights.__getitem__, dtype=dtype)
    loss, gradients = e.forward_backward(batch), e.gradients.flat.copy()
    filled = PackedBatch(
        np.concatenate([np.ones(9), batch.token_ids, np.ones(70)]).astype(np.int32),
        np.concatenate([-np.ones(9), batch.targets, -np.ones(70)]).astype(np.int32),
        np.array([0, 9, 49, 72, 100, 142], np.int32),
    )
    e.zero_grad()
    assert e.forward_backward(filled) == e.loss(filled) == loss and np.array_equal(e.gradients.flat, gradients)
    e.zero_grad()
    assert e.forward_backward(replace(batch, targets=np.full(63, -1))) == 0 and not np.any(e.gradients.flat)
    e.close()


def test_changed_parameters_are_seen():
    spec, weights = random_model()
    batch = random_batch([9, 20], 51)
    e = executable(spec, 29, weights.__getitem__)
    e.forward_backward(batch)
    before, gradient = e.loss(batch), e.gradients.flat.astype(np.float64)
    e.parameters.flat[:] -= 1e-4 * e.gradients.flat / np.linalg.norm(gradient)
    assert before - e.loss(batch) == pytest.approx(1e-4 * np.linalg.norm(gradient), rel=0.05)
    e.close()


@cases(
    "trained, dtype",
    [(None, "float32"), (None, "bfloat16"), (["model.layers.1.self_attn.v_proj.weight"], "float32")],
)
def test_planned_memory_is_what_is_taken(trained, dtype):
    """Activations and packed weights to the byte, the workspace about."""
    spec = small_spec(heads=8, kv_heads=4, head_dim=32, ffn=512, vocab=1000)
    program = lower_model(spec, 128, dtype, trained=trained)
    shapes = program.shards.whole_shapes
    e = NativeExecutable(program, lambda name: np.ones(shapes[name], np.float32))
    state = 4 * state_floats("adamw", STATES["adamw"], program.trained_shards.shapes)
    planned = training_bytes(program, state)
    assert planned["trained weights"] == planned["gradients"] == e.gradients.flat.nbytes
    assert planned["optimizer state"] == 2 * e.gradients.flat.nbytes
    read = 4 * program.lowered.floats - e.gradients.flat.nbytes  # frozen weights before they are packed
    assert (planned["activations"], planned["frozen weights"]) == (e.bytes.activations, read + e.bytes.packed)
    assert e.bytes.workspace * 0.7 < planned["workspace"] < 2 * e.bytes.workspace
    e.close()


@functools.cache
def of_mesh(piece, dtype):
    """(spec, weights, batch, reference) of a model for meshes."""
    heads = {"heads": 6, "kv_heads": 3, "head_dim": 12, "ffn": 100, "vocab": 77}
    kinds = {
        "plain": {"mixer": {"qkv_bias": True, "o_bias": True}, "tie_embeddings": True},
        "unequal": PIECES["unequal"],
        "soft_cap": {"mixer": {"soft_cap": 3.0}, "logit_soft_cap": 4.0},
        "qwen3": {"mixer": {"qk_norm": "head"}},
        "latent": {
            **LINEAR["latent"],
            "layer": {"ffn": MoeFfn(8, 100, Routing(3, "sigmoid", scale=2.5, groups=4, top_groups=2), shared_size=70)},
        },
        "experts": {"layer": {"ffn": MoeFfn(5, 70, Routing(2), shared_size=100, shared_gate=True)}},
    }
    spec = without_choice(small_spec(**{**heads, **kinds[piece]}), dtype)
    rng = np.random.default_rng(7)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {
        w.name: (0.2 * rng.standard_normal([d.elements for d in w.dims])).astype(np.float32) for w in program.weights
    }
    batch = random_batch([40, 23, 1, 31], spec.vocab_size)
    return spec, weights, batch, reference(spec, weights, batch)


# What a mesh adds to the error of one rank: sums in another order.
@pairs(
    {
        "piece": ["plain", "unequal", "soft_cap", "qwen3", "experts", "latent"],
        "dp, tp": [(2, 2), (1, 3), (1, 2)],
        "dtype": ["float32", "bfloat16"],
    }
)
def test_meshes(dp, tp, dtype, piece):
    """Every rank has its shard of the whole gradients, the same bits as its peers of other replicas; weights that all
    ranks hold have the same bits on all. Twice, to the same bits.
    """
    spec, weights, batch, (loss, gradients) = of_mesh(piece, dtype)
    parts = split(batch, dp)

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=60)
        e = executable(
            spec, 100, weights.__getitem__, dtype, ThreadPool(2), communicator, tp=tp, recompute=bool(dp - 1)
        )
        part = parts[e.ranks.mesh.index("dp")]
        first = e.forward_backward(part, reduce=False)
        assert e.loss(part) == first
        found = []
        for _ in range(2):
            e.zero_grad()
            assert e.forward_backward(part) == first
            found.append(e.gradients.flat.copy())
        np.testing.assert_array_equal(*found)
        shards = e.program.shards
        own = {name: shards.part(name, g) for name, g in gradients.items()}
        result = first, errors(e.gradients, own), {name: g.copy() for name, g in e.gradients.items()}, shards
        communicator.barrier()
        e.close()
        return result

    results = run_threads(dp * tp, body)
    assert sum(own for own, *_ in results[::tp]) == pytest.approx(loss, rel=LOSS_ERROR[dtype])
    for rank, (own, found, made, shards) in enumerate(results):
        assert own == results[rank // tp * tp][0]
        assert max(found.values()) < GRADIENT_ERROR[dtype], found
        assert all(np.array_equal(g, results[rank % tp][2][name]) for name, g in made.items())
        assert all(np.array_equal(made[name], results[0][2][name]) for name in shards.replicated)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_gradients(ranks):
    spec, weights = model("qwen3")
    batch = batches()[0]
    loss, gradients = reference(spec, weights, batch)
    parts = split(batch, ranks)

    def body(world):
        communicator = open_communicator(world, arena_bytes=1 << 26, timeout=30)
        e = executable(spec, 64, weights.__getitem__, communicator=communicator)
        first = e.forward_backward(parts[world.rank], reduce=False)
        e.zero_grad()
        assert e.forward_backward(parts[world.rank]) == first
        result = first, {name: g.copy() for name, g in e.gradients.items()}
        communicator.barrier()
        e.close()
        return result

    results = run_threads(ranks, body)
    assert sum(own for own, _ in results) == pytest.approx(loss, rel=1e-6)
    assert max(errors(results[0][1], gradients).values()) < 1e-5
    for _, other in results[1:]:
        assert all(np.array_equal(other[name], g) for name, g in results[0][1].items())


def test_some_weights_alone():
    spec, weights = random_model()
    batch = random_batch([30], 51)
    names = ["model.layers.1.self_attn.v_proj.weight", "model.layers.0.input_layernorm.weight"]
    _, gradients = reference(spec, weights, batch)
    e = executable(spec, 30, weights.__getitem__, trained=names)
    e.forward_backward(batch)
    assert list(e.gradients) == list(e.parameters) == names
    assert max(errors(e.gradients, {name: gradients[name] for name in names}).values()) < 1e-5
    e.close()


def test_a_frozen_weight_beside_a_trained_one_is_kept():
    # matrices of whole pages
    spec = replace(small_spec(heads=4, kv_heads=4, head_dim=16, ffn=64, vocab=51), hidden_size=64)
    rng = np.random.default_rng(0)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {
        w.name: (0.3 * rng.standard_normal([d.elements for d in w.dims])).astype(np.float32) for w in program.weights
    }
    e = executable(
        spec, 30, weights.__getitem__, trained=[f"model.layers.{i}.self_attn.v_proj.weight" for i in range(2)]
    )
    batch, found = random_batch([30], 51), []
    for _ in range(2):  # the first run gives back the pages of what is packed for good
        e.zero_grad()
        found.append((e.forward_backward(batch), e.gradients.flat.copy()))
    assert found[0][0] == found[1][0] and np.array_equal(found[0][1], found[1][1]) and np.any(found[0][1])
    e.close()


@pytest.mark.parametrize(
    "batch, message",
    [
        (([1] * 31, [1] * 31, [0, 31]), "31 tokens does not fit .* for 30"),
        (([1, 51], [1, 1], [0, 2]), "token 1 has id 51; .* 0 to 50"),
        (([1, 2], [-2, 1], [0, 2]), "token 0 has target -2"),
        (([1, 2], [1, 1], [0, 1]), "starts of 1 sequences must go from 0 to 2"),
        (([1, 2], [1, 1], [0, 2, 1, 2]), "sequence 1 starts at 2 and ends before it, at 1"),
        (([1, 2], [1], [0, 2]), "2 tokens and 1 targets"),
    ],
)
def test_bad_batches_are_refused(batch, message):
    spec, weights = random_model()
    e = executable(spec, 30, weights.__getitem__)
    with pytest.raises(ConfigError, match=message):
        e.forward_backward(PackedBatch(*(np.array(a, np.int32) for a in batch)))
    e.close()
    with pytest.raises(ConfigError, match="float64"):
        executable(spec, 30, weights.__getitem__, dtype="float64")
