"""The optimizer beside PyTorch's numbers, over threads, ISAs and ranks; clipping; steps that are skipped; schedules."""

import numpy as np
import pytest

from ckdist import native
from ckdist.comm.communicator import open_communicator
from ckdist.mesh import Mesh
from ckdist.program.pool import ThreadPool
from ckdist.train.arena import Arena
from ckdist.train.config import TrainConfig
from ckdist.train.moments import state_floats
from ckdist.train.optimizer import STATES, Optimizer
from ckdist.train.ranks import TrainingRanks
from ckdist.train.schedule import Schedule
from tests.golden.make_optimizer_golden import CLIP, DECAY, RATES, SHAPES, STEPS
from tests.support.levels import HERE, VECTORS
from tests.support.paths import GOLDEN as GOLDEN_FILES
from tests.support.thread_ranks import run_threads

GOLDEN = GOLDEN_FILES / "optimizer.npz"


def config(**fields) -> TrainConfig:
    common = {
        "output_dir": "out",
        "train_file": "text",
        "model_name_or_path": "model",
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-7,
        "momentum": 0.8,
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
    }
    return TrainConfig(**common | fields)


def taken(kind: str, stored, threads: int = 1, world=None) -> tuple[Optimizer, Arena]:
    """The golden steps; over ranks, each holds a part of every gradient."""
    communicator = open_communicator(world, timeout=20) if world else None
    ranks = world.size if world else 1
    parameters, gradients = Arena(SHAPES), Arena(SHAPES)
    for name, view in parameters.items():
        view[:] = stored[f"first/{name}"]
    optimizer = Optimizer(
        config(optim=kind, zero_stage=int(ranks > 1 and kind in ("adamw", "sgd"))),
        parameters,
        gradients,
        TrainingRanks.split(Mesh.of_job(ranks, world.rank if world else 0), communicator),
        ThreadPool(threads),
    )
    for step in range(STEPS):
        for name, view in gradients.items():
            whole = kind not in ("adamw", "sgd") or ranks == 1  # its gradients are summed before
            view[:] = stored[f"gradient{step}/{name}"] * (16 if whole else 16 / ranks)  # sums over 16 tokens
        assert not optimizer.step(RATES[kind], 16).skipped
    return optimizer, parameters


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["adafactor", "adamw_8bit"])
def test_small_states_are_those_of_the_reference(kind, ranks):
    with np.load(GOLDEN) as file:
        stored = dict(file)
    results = run_threads(ranks, lambda world: taken(kind, stored, ranks, world=world if ranks > 1 else None))
    for optimizer, parameters in results:
        np.testing.assert_array_equal(parameters.flat, results[0][1].flat)
        for name, view in parameters.items():
            # a value near the middle of two codes may get the other one
            atol = 2e-6 if kind == "adafactor" else 2e-5
            np.testing.assert_allclose(view, stored[f"{kind}/{name}"], rtol=2e-6, atol=atol, err_msg=name)
            assert np.abs(view - stored[f"first/{name}"]).max() > 1e-3
        sizes = {name: array.nbytes for name, array in optimizer.state.items()}
        assert sum(sizes.values()) == 4 * state_floats(kind, sizes, SHAPES)
    numbers = 4 * state_floats(kind, STATES[kind], {"a": (1024, 512)})
    assert numbers == (1024 * 512 * (2 + 8 / 256) if kind == "adamw_8bit" else 4 * (1024 + 512))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_as_pytorch(kind):
    with np.load(GOLDEN) as stored:
        _, parameters = taken(kind, stored, threads=2)
        for name, view in parameters.items():
            np.testing.assert_allclose(view, stored[f"{kind}/{name}"], rtol=2e-6, atol=2e-7, err_msg=name)
            assert np.abs(view - stored[f"first/{name}"]).max() > 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_muon_as_pytorch(ranks):
    with np.load(GOLDEN) as file:
        stored = dict(file)
    results = run_threads(ranks, lambda world: taken("muon", stored, world=world if ranks > 1 else None)[1])
    for parameters in results:
        np.testing.assert_array_equal(parameters.flat, results[0].flat)
        for name, view in parameters.items():
            np.testing.assert_allclose(view, stored[f"muon/{name}"], rtol=2e-5, atol=2e-6, err_msg=name)
            assert np.abs(view - stored[f"first/{name}"]).max() > 1e-3


@pytest.mark.parametrize("ranks", [2, 3])
def test_state_cut_over_ranks_gives_what_one_rank_gives(ranks):
    with np.load(GOLDEN) as file:
        stored = dict(file)
    whole = taken("adamw", stored)[0]

    def body(world):
        optimizer, parameters = taken("adamw", stored, world=world)
        assert optimizer.state["exp_avg"].size < parameters.flat.size
        return parameters.flat.copy(), optimizer.state["exp_avg"]

    results = run_threads(ranks, body)
    for flat, _ in results:
        np.testing.assert_array_equal(flat, results[0][0])
        np.testing.assert_allclose(flat, whole.parameters.flat, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        np.concatenate([state for _, state in results]), whole.state["exp_avg"], rtol=1e-5, atol=1e-8
    )


def native_pass(isa: str | None, threads: int, n: int = 100_003):
    rng = np.random.default_rng(1)
    p, g, m, v = (rng.standard_normal(n).astype(np.float32) for _ in range(4))
    v = np.abs(v)
    ffi, lib = native.ffi, native.lib
    out = ffi.new("struct ckdist_optimizer **")
    pool = ThreadPool(threads, spins=100)
    native.check(lib.ckdist_optimizer_new(ffi.NULL if isa is None else isa.encode(), pool.handle, out))
    handle = ffi.gc(out[0], lib.ckdist_optimizer_free)
    total = ffi.new("double *")
    native.check(lib.ckdist_optimizer_sum_squares(handle, native.pointer(g, "float *"), n, total))
    ends, decays = np.array([7, 7, 50_001, n], np.int64), np.array([1, 1, 0, 1], np.uint8)
    update = ffi.new(
        "struct ckdist_update *",
        {"parts": 4, "n": n, "step": 3, "gradient_scale": 0.5, "learning_rate": 0.01, "weight_decay": 0.1},
    )
    update.ends, update.decays = native.pointer(ends, "int64_t *"), native.pointer(decays, "uint8_t *")
    update.parameters, update.gradients = native.pointer(p, "float *"), native.pointer(g, "float *")
    native.check(
        lib.ckdist_optimizer_adamw(
            handle, update, 0.9, 0.99, 1e-8, native.pointer(m, "float *"), native.pointer(v, "float *")
        )
    )
    return total[0], p, m, v, g


def test_the_same_bits_by_any_threads_and_isa():
    total, *arrays, g = native_pass("baseline", 1)
    assert total == pytest.approx(float((g.astype(np.float64) ** 2).sum()), rel=1e-13)
    for isa in set(HERE) & set(VECTORS):
        for threads in (1, 3):
            other = native_pass(isa, threads)
            assert other[0] == total
            for a, b in zip(arrays, other[1:4], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    parameters, gradients = Arena(SHAPES), Arena(SHAPES)
    parameters.flat[:] = 1
    optimizer = Optimizer(config(), parameters, gradients)
    gradients["norm.weight"][3] = bad
    result = optimizer.step(0.1, 1)
    assert result.skipped == (not np.isfinite(bad))
    if result.skipped:
        assert optimizer.steps == 0 and (parameters.flat == 1).all() and not optimizer.state["exp_avg"].any()
    else:
        assert np.isfinite(parameters.flat).all()
    assert optimizer.step(0.1, 0).skipped, "no token with a target"


def test_schedules():
    def rates(kind: str, **more) -> list[float]:
        schedule = Schedule(config(lr_scheduler_type=kind, learning_rate=1.0, **more), 10)
        return [schedule.rate(step) for step in range(10)]

    assert rates("constant", warmup_steps=2) == [0.5, 1.0] + [1.0] * 8
    np.testing.assert_allclose(rates("linear", warmup_steps=2), [0.5, 1] + [1 - i / 8 for i in range(8)])
    np.testing.assert_allclose(
        rates("cosine", min_lr_ratio=0.1), [0.1 + 0.45 * (1 + np.cos(np.pi * i / 10)) for i in range(10)]
    )
    np.testing.assert_allclose(
        rates("wsd", warmup_steps=1, num_decay_steps=4, min_lr_ratio=0.5), [1] * 7 + [0.875, 0.75, 0.625]
    )
    np.testing.assert_allclose(  # the decay begins after the warm-up, even if fewer steps are left
        rates("wsd", warmup_steps=7, num_decay_steps=5), [*np.arange(1, 8) / 7, 1, 2 / 3, 1 / 3]
    )
