"""Figures of a machine are found again from the steps that they were made of; and kernels are timed as they are."""

import dataclasses
import os

import pytest

from ckdist import native
from ckdist.cli.calibration import Measured, calibrated, solved
from ckdist.cli.made_models import (
    ALONE,
    DENSE,
    FOLDERS,
    LATENT,
    MADE,
    MIXTURE,
    NEAR,
    NEAR_STEPS,
    SAME,
    TYPES,
    WIDE,
    deep_layers,
    write_model,
)
from ckdist.cli.traced_steps import TracedSteps
from ckdist.cli.training_speed import MOST_KEYS, UPDATE, fitted, other_keys
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.start_up import load_model
from ckdist.errors import NativeError
from ckdist.mesh import Mesh
from ckdist.models.registry import spec_from_config
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import ATTENTION, OTHERS, PRODUCT
from ckdist.planning.kernel_speed import attention_rate, elementwise_rate, product_rate
from ckdist.planning.machine_spec import MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.planning.step_shape import StepShape
from ckdist.train.loss_program import lower_model
from ckdist.train.training_step_cost import ATTENTION_KINDS, PRODUCT_KINDS, WAITING_KINDS, TrainingStepCost
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.described import describe_config
from ckdist.weights.dtypes import BF16, Q4_K

RATES = {
    "BF16": (1e10, 3e10, 6e10, 9e10, 9e10), "Q8_0": (2e10, 5e10, 9e10, 1e11, 2e11),
    "Q4_K": (1e10, 4e10, 1e11, 1e11, 1e11), "Q6_K": (1e10, 3e10, 7e10, 1e11, 1e11),
    "F32": (4e9, 1e10, 2e10, 3e10, 3e10),
}  # fmt: skip
TRUE = MachineSpec(
    isa="avx512_bf16",
    cores=4, memory=64e9, bandwidth=40e9, achieved_bandwidth=0.7, core_bandwidth=15e9, f32=4e10, bf16=1e11, int8=2e11,
    attention=3e10, attention_scores=2e8, attention_one=2e9, attention_given=3e8, attention_once=3e-6,
    attention_read=0.8, latent=2e10, latent_one=3e9, latent_given=5e8, latent_once=7e-6, elementwise=7e8,
    overlap_loss=0.4, heads=1e9, heads_int8=5e8, heads_once=6e-7, achieved_experts=0.8, achieved_experts_int8=0.7,
    experts_once=6e-6, products=RATES, between=1e-4, between_far=8e-4,
    reuse=((1e8, 80e9), (2e8, 50e9), (4e8, 50e9), (7e8, 28e9)),
)  # fmt: skip


def predictor(config: dict, quantize: str | None) -> Predictor:
    return Predictor(describe_config(config, "made up", (quantize or "bf16").upper()), Cluster(TRUE), Way("tensor"))


def measured(name: str) -> Measured:
    config, quantize, shapes = MADE[name]
    cost = predictor(config, quantize).stages[0].costs[0]
    from_memory = cost.on(dataclasses.replace(TRUE, reuse=()))
    return Measured({shape: [from_memory.groups(shape)] * 3 for shape in shapes}, cost)


def measured_near(name: str) -> Measured:
    """Steps with nothing read in between."""
    first, _, depth = name.partition(" ")
    if first in TYPES:
        layers = {"same": SAME[first], "dense": DENSE["num_hidden_layers"], "deep": 18}
        config = DENSE | {"num_hidden_layers": layers[depth]}
        cost = predictor(config, TYPES[first]).stages[0].costs[0]
    else:
        cost = predictor(*(MADE[name][:2] if name in MADE else (FOLDERS[name], None))).stages[0].costs[0]
    groups = {shape: cost.groups(shape) for shape in NEAR_STEPS[name]}
    times = {shape: [{**each, "total": cost.step(shape).total}] * 3 for shape, each in groups.items()}
    return Measured(times, cost, evicted=False)


def test_all_figures_are_found_again():
    kernels = {kind: (rates[0], *(rate * 1.5 for rate in rates[1:])) for kind, rates in RATES.items()}
    wrong = dataclasses.replace(
        TRUE, achieved_bandwidth=0.9, attention=1e9, attention_scores=0.0, attention_one=1e9, attention_given=1e9,
        attention_once=0.0, attention_read=1.0, latent=1e9, latent_one=1e9, latent_given=0.0, latent_once=0.0,
        elementwise=1e8, overlap_loss=1.0, between=1e-5, between_far=0.0, heads=1e8, heads_once=0.0,
        achieved_experts_int8=0.0, experts_once=0.0, products={**kernels, "F32": RATES["F32"]},
    )  # fmt: skip
    near = {name + NEAR: measured_near(name) for name in NEAR_STEPS}
    found = calibrated(wrong, {name: measured(name) for name in MADE} | near)
    for name in MADE:
        for shape in MADE[name][2]:
            cost = measured(name).cost
            found_seconds, true_seconds = (cost.on(machine).step(shape).total for machine in (found, TRUE))
            assert found_seconds == pytest.approx(true_seconds, rel=0.05)
    figures = "attention", "attention_one", "attention_given", "attention_read", "latent", "latent_one", "latent_given"
    figures += "attention_scores", "attention_once", "latent_once", "elementwise", "experts_once", "achieved_experts"
    figures += "achieved_experts_int8", "heads", "heads_int8", "heads_once", "between", "between_far"
    for name in figures:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert found.overlap_loss == pytest.approx(TRUE.overlap_loss, abs=0.015)
    assert found.products["Q6_K"][4] == pytest.approx(RATES["Q6_K"][4], rel=0.05)  # as other types of its activations
    assert found.products["F32"] == RATES["F32"]  # nothing was measured of its activations
    for size, rate in found.reuse:
        assert rate == pytest.approx(TRUE.read_rate(4, between=size), rel=0.03)


def test_the_deep_model_leaves_nothing_of_it_in_caches():
    assert [deep_layers(size) for size in (0, 480e6, 1e12)] == [8, 18, 32]


def test_what_no_figure_explains_stays_at_a_bound():
    one = dataclasses.replace(measured("plain"), times={ALONE: [{OTHERS: 1e3}]})
    assert solved(TRUE, "elementwise", (1e6, 1e11), OTHERS, (one, ALONE)).elementwise == pytest.approx(1e6, rel=1e-3)


def test_what_was_measured_twice_is_one():
    low, high = ({ALONE: [{OTHERS: seconds}] * 3} for seconds in (1.0, 3.0))
    cost = measured("plain").cost
    assert Measured(low, cost).joined(Measured(high, cost)).seconds(ALONE, OTHERS) == 2.0


def test_the_parts_of_a_step_are_those_of_its_threads():
    given = os.sched_getaffinity(0)
    model = load_model(EngineConfig(ctx_size=64, parallel=2, repack="off", threads=1), SingleWorld())
    try:
        for shape in (StepShape.decode(2, 16), StepShape.prompt(32)):
            turns = TracedSteps(model).measured([(shape, 0)], 2)[0]
            assert len(turns) == 2
            for found in turns:
                parts = [found[group] for group in (PRODUCT, ATTENTION, OTHERS)]
                assert min(parts) > 0 and sum(parts) <= found["total"]
    finally:
        model.close()
    assert os.sched_getaffinity(0) == given, "a model that is closed leaves no thread where it pinned it"


def test_figures_of_training_are_found_again():
    true = dataclasses.replace(
        TRUE, training=0.4, training_attention=6e9, training_keys=100.0, training_elementwise=2e8,
        training_packing=0.8, training_optimizer=1.4,
    )  # fmt: skip
    small = {**DENSE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 16}
    program = lower_model(spec_from_config(small, "small"), 64, "bfloat16", Mesh.of_job(1, 0))
    cost = TrainingStepCost(program, Cluster(true, ranks=1), 64, recompute=False)
    threads, seconds = cost.threads, dict[int, dict[str, float]]()
    for length in (32, 64):
        work, _ = dataclasses.replace(cost, sequence=length).stage_work[0]
        kinds = dict.fromkeys((*PRODUCT_KINDS, *ATTENTION_KINDS, *WAITING_KINDS), 0.0)
        packing = work.packed / (0.8 * true.read_rate(threads))
        rate = 0.4 * true.product_rate("BF16", 1, 256) * threads
        seconds[length] = kinds | {
            "matmul": 64 * work.products / rate + work.gradients / true.read_rate(threads) + packing,
            "attend_grad": 64 * work.attention / (6e9 * threads),
            "rope": 64 * work.elements / (2e8 * threads),
            "pack": packing,
            UPDATE: cost.update_bytes / (1.4 * true.read_rate(threads)),
        }
    wrong = dataclasses.replace(TRUE, training_keys=7.0, training_optimizer=3.0)
    found = fitted(wrong, dataclasses.replace(cost, cluster=Cluster(wrong, ranks=1)), 64, seconds)
    for name in ("training_attention", "training_keys", "training_elementwise", "training_packing"):
        assert getattr(found, name) == pytest.approx(getattr(true, name)), name
    assert found.training_optimizer == pytest.approx(1.4)
    assert found.training == pytest.approx(0.4, rel=0.2)  # of a rate of fewer rows


@pytest.mark.parametrize("below, above, keys", [(1.0, 1.0, MOST_KEYS), (1.0, 9.0, 0.0), (2.0, 1.0, MOST_KEYS)])
def test_what_attention_does_beside_keys_has_bounds(below, above, keys):
    assert other_keys(128, 512, below, above) == keys


@pytest.mark.parametrize("config", [DENSE, WIDE, LATENT, MIXTURE])
def test_the_models_that_are_made_up_are_models(config, tmp_path):
    small = {**config, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    checkpoint = open_checkpoint(write_model(tmp_path / "made", small))
    assert checkpoint.spec == describe_config(small, "the same").spec


def test_kernels_are_timed():
    rates = [product_rate([0], kind.number, 4, 1e-3, 64, 1) for kind in (BF16, Q4_K)]
    assert min(rates) > 1e6 and attention_rate(0, "i16", 1e-3) > 1e6 and elementwise_rate(0, 1e-3) > 1e5
    out = native.ffi.new("double *")
    for number, rows, cols, tokens in ((999, 16, 256, 1), (12, 16, 255, 1), (12, 0, 256, 1), (12, 1 << 40, 256, 1)):
        with pytest.raises(NativeError):
            arguments = (native.ffi.NULL, number, 1, native.ffi.NULL, rows, cols, tokens, 1e-3, 1, out)
            native.check(native.lib.ckdist_product_rate(*arguments))
