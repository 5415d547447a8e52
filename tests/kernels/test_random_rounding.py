"""bfloat16 weights: random rounding beside its numpy definition, and updates that depend neither on ranks nor ISAs."""

import math
import zlib

import numpy as np
import pytest

from ckdist import native
from ckdist.program.pool import ThreadPool
from ckdist.train.arena import NARROW, Arena, assign, widened
from ckdist.train.config import TrainConfig
from ckdist.train.moments import rounding
from ckdist.train.optimizer import Optimizer
from tests.kernels.test_whole_updates import updated
from tests.support.levels import HERE, VECTORS
from tests.support.thread_ranks import run_threads

EXPERTS, SEED = (3, 5, 70), 7


def hashed(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor) % 2**32
    return x ^ x >> np.uint64(16)


def rounded(values: np.ndarray, name: str, step: int, seed: int = SEED) -> np.ndarray:
    """The definition, for a whole weight: 16 random bits are added below the bits that are kept."""
    columns = values.shape[-1]
    key = hashed(zlib.crc32(f"{seed} {name}".encode()) ^ hashed(np.array(step)))
    rows = hashed((key + np.arange(values.size // columns) * 0x9E3779B9) % 2**32)
    random = hashed((rows[:, None] + np.arange(columns) * 0x9E3779B9) % 2**32) >> 16
    bits = np.ascontiguousarray(values).reshape(-1, columns).view(np.uint32).astype(np.int64)
    return ((bits + random.astype(np.int64)) >> 16).astype(np.uint16).reshape(values.shape)


def native_rounded(values: np.ndarray, place: dict, step: int, isa: str | None = None) -> np.ndarray:
    handle = native.new(native.lib.ckdist_optimizer_new, isa, ThreadPool(1).handle)
    flat, out = np.ascontiguousarray(values).reshape(-1), np.empty(values.size, np.uint16)
    update = {"ends": np.array([flat.size]), "decays": np.zeros(1, np.uint8), "parts": 1, "n": flat.size}
    update |= {"step": step, "narrow": out, "rounding": [place]}
    native.call(native.lib.ckdist_optimizer_round, handle, update, flat)
    return out.reshape(values.shape)


def test_rounding_is_its_definition_for_any_shard_and_isa():
    values = np.random.default_rng(3).standard_normal(EXPERTS, np.float32)
    expected = rounded(values, "experts", 9)
    spans = ((1, 3), (2, 5), (3, 66))
    part = tuple(slice(*span) for span in spans)
    for isa in {"baseline", *HERE} & {"baseline", *VECTORS}:
        whole = native_rounded(values, rounding(SEED, "experts", EXPERTS), 9, isa)
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(
            native_rounded(values[part], rounding(SEED, "experts", EXPERTS, spans), 9, isa), expected[part]
        )
        flat = values[part].reshape(-1)[101:]
        np.testing.assert_array_equal(
            native_rounded(flat, rounding(SEED, "experts", EXPERTS, spans, 101), 9, isa),
            expected[part].reshape(-1)[101:],
        )
    vector = values.reshape(-1)
    np.testing.assert_array_equal(
        native_rounded(vector[40:], rounding(SEED, "norm", vector.shape, ((40, vector.size),)), 2),
        rounded(vector, "norm", 2)[40:],
    )


def test_rounding_has_the_right_mean_and_keeps_what_needs_none():
    exact = np.array([0, -0.0, 1, -3.5, np.inf, -np.inf, 2.0**-130], np.float32)
    place = rounding(SEED, "w", exact.shape)
    np.testing.assert_array_equal(widened(native_rounded(exact, place, 1)), exact)
    assert np.isnan(widened(native_rounded(np.array([np.nan], np.float32), place, 1))).all()
    values = np.random.default_rng(4).standard_normal(500, np.float32) * np.float32(1e-3)
    low = widened((values.view(np.uint32) >> 16).astype(np.uint16))
    place, steps = rounding(SEED, "w", values.shape), 1000
    found = np.array([widened(native_rounded(values, place, step)) for step in range(1, steps + 1)], np.float64)
    unit = np.abs(values).astype(np.float64) * 2.0**-7  # at least the distance of neighbours
    assert (np.abs(found - low) <= unit).all()
    deviations = (found.mean(0) - values) / (unit * 0.5 / math.sqrt(steps))
    assert np.abs(deviations).max() < 4.5 and np.abs(deviations.mean()) < 4.5 / math.sqrt(values.size)


def test_an_update_is_that_of_float32_rounded():
    shapes = {"a.weight": (9, 70), "norm.weight": (2300,)}
    rng = np.random.default_rng(5)
    more = {"output_dir": "out", "train_file": "text", "model_name_or_path": "m", "weight_decay": 0.1, "seed": SEED}
    for optim in ("adamw", "sgd", "adamw_8bit", "adafactor", "muon"):
        config = TrainConfig(optim=optim, max_grad_norm=0.0, **more)
        narrow, wide, gradients = Arena(shapes, dtype=NARROW), Arena(shapes), Arena(shapes)
        for name, view in narrow.items():
            assign(view, rng.standard_normal(view.shape, np.float32))
            wide[name][...] = widened(view)
            gradients[name][...] = rng.standard_normal(view.shape, np.float32)
        for arena in (narrow, wide):
            Optimizer(config, arena, gradients, pool=ThreadPool(2)).step(1e-3, 1)
        for name, view in narrow.items():
            np.testing.assert_array_equal(view, rounded(wide[name], name, 1), err_msg=f"{optim} {name}")


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "muon"])
def test_updates_of_any_mesh_are_those_of_one_rank(optim):
    expected = updated(optim, 1, 1, 0, dtype=NARROW)[1]
    for dp, tp, zero in ((1, 3, 0), (3, 1, 1), (2, 2, 1)):
        found = run_threads(dp * tp, lambda world, mesh=(dp, tp, zero): updated(optim, *mesh, world, NARROW))
        for shards, parameters, _ in found:
            for name, view in parameters.items():
                np.testing.assert_array_equal(view, shards.part(name, expected[name]), err_msg=f"{dp} {tp} {name}")
