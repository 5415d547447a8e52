"""Figures of a machine are found again from the steps that they were made of; and kernels are timed as they are."""

import dataclasses

import pytest

from ckdist import native
from ckdist.cli import calibration
from ckdist.cli.calibration import DENSE, LATENT, Measured
from ckdist.errors import NativeError
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import StepShape
from ckdist.planning.kernel_speed import attention_rate, elementwise_rate, product_rate
from ckdist.planning.machine import MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.described import describe_config
from ckdist.weights.dtypes import BF16, Q4_K

TRUE = MachineSpec(
    cores=4, memory=64e9, bandwidth=40e9, achieved_bandwidth=0.7, core_bandwidth=15e9, f32=4e10, bf16=1e11, int8=2e11,
    attention=3e10, attention_one=2e9, elementwise=7e8, overlap_loss=0.4,
)  # fmt: skip


def measured(kind: str, config=DENSE) -> Measured:
    cost = Predictor(describe_config(config, "made up", kind), Cluster(TRUE), Way("tensor")).stages[0].costs[0]
    shapes = [StepShape.decode(1, 32), StepShape.decode(1, 1024), StepShape.prompt(128), StepShape.prompt(512)]
    return Measured({shape: cost.step(shape).total for shape in shapes}, TRUE.bandwidth, cost)


@pytest.mark.parametrize(
    "name, kind, shape, bounds",
    [
        ("achieved_bandwidth", "BF16", StepShape.decode(1, 32), (0.05, 1.0)),
        ("overlap_loss", "Q4_K", StepShape.decode(1, 32), (0.0, 4.0)),
        ("attention_one", "BF16", StepShape.decode(1, 1024), (1e6, 1e13)),
        ("elementwise", "BF16", StepShape.prompt(128), (1e6, 1e11)),
        ("attention", "BF16", StepShape.prompt(512), (1e7, 1e13)),
    ],
)
def test_a_figure_is_found_again(name, kind, shape, bounds):
    wrong = dataclasses.replace(TRUE, **{name: getattr(TRUE, name) * 0.3})
    found = getattr(measured(kind).solved(wrong, name, bounds, shape), name)
    assert found == pytest.approx(getattr(TRUE, name), rel=1e-3)


def test_what_no_figure_explains_stays_at_a_bound():
    one = dataclasses.replace(measured("BF16"), times={StepShape.decode(1, 32): 1e3})
    assert one.solved(TRUE, "achieved_bandwidth", (0.05, 1.0), StepShape.decode(1, 32)).achieved_bandwidth == (
        pytest.approx(0.05, rel=1e-3)
    )


@pytest.mark.parametrize("config", [DENSE, LATENT])
def test_the_models_that_are_made_up_are_models(config, tmp_path):
    small = {**config, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    checkpoint = open_checkpoint(calibration._write(tmp_path / "made", small))
    assert checkpoint.spec == describe_config(small, "the same").spec


def test_kernels_are_timed():
    rates = [product_rate([0], kind.number, 4, 1e-3, 64, 1) for kind in (BF16, Q4_K)]
    assert min(rates) > 1e6 and attention_rate(0, "i16", 1e-3) > 1e6 and elementwise_rate(0, 1e-3) > 1e5
    out = native.ffi.new("double *")
    for number, rows, cols, tokens in ((999, 16, 256, 1), (12, 16, 255, 1), (12, 0, 256, 1), (12, 1 << 40, 256, 1)):
        with pytest.raises(NativeError):
            arguments = (native.ffi.NULL, number, 1, native.ffi.NULL, rows, cols, tokens, 1e-3, 1, out)
            native.check(native.lib.ckdist_product_rate(*arguments))
