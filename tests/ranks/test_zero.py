"""ZeRO: optimizer states, gradients and weights over replicas. Every stage gives the bits of the first."""

import pathlib

import numpy as np
import pytest

from ckdist.program import gathered_parameters, lower_training
from ckdist.train import trainer
from tests.support.curves import ROWS, WIDE, assert_same_curve, curve, metrics, tensors, wide

EXPERTS = {**WIDE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
NARROW = {"weights_dtype": "bfloat16"}
TIED = {**WIDE, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    """A layer of these small models has several units, and all but the first are freed."""
    monkeypatch.setattr(lower_training, "KEPT_FLOATS", 16_000)
    monkeypatch.setattr(lower_training, "BUCKET_BYTES", 16_000)
    monkeypatch.setattr(gathered_parameters, "UNIT_FLOATS", 4000)


def trained(folder: pathlib.Path, ranks: int, zero: int, steps: int = 2, **fields) -> tuple[list, dict]:
    """The metrics of a training, and the checkpoint's tensors."""
    common = {"zero_stage": zero, "max_steps": steps, "save_steps": 0, "per_device_train_batch_size": 3}
    c = wide(folder, **common | fields)
    curve(c, ranks)
    return metrics(folder / "out"), tensors(folder / "out" / f"checkpoint-{steps}")


@pytest.mark.parametrize(
    "ranks, fields",
    [
        (3, {"per_device_train_batch_size": 2, "activation_checkpointing": True, "bf16": True, "model_config": TIED}),
        (4, {"tensor_parallel_size": 2, "transport": "tcp", "samples": 1}),
        (2, {"sequence_parallel_size": 2, "per_device_train_batch_size": 6, "model_config": EXPERTS, **NARROW}),
    ],
)
def test_every_stage_has_the_bits_of_the_first(tmp_path, ranks, fields):
    expected, weights = trained(tmp_path / "1", ranks, 1, **fields)
    for stage in (2, 3):
        found, same = trained(tmp_path / str(stage), ranks, stage, **fields)
        for line, other in zip(found, expected, strict=True):
            for name in ("loss", "grad_norm", "tokens"):
                assert line[name] == other[name], (stage, name)
            assert line.get("eval_loss") == other.get("eval_loss")
        assert same.keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(same[name], array, err_msg=f"{stage} {name}")


@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_shares_add_up_micro_batches_and_a_run_goes_on_in_another_stage(tmp_path, optim):
    """Shares are sums over ranks, then over batches; without shards it is the other way round."""
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "optim": optim, "save_steps": 0}
    expected, weights = trained(tmp_path / "1", 2, 1, 4, **fields)
    at = lambda dp, tp, zero: wide(tmp_path / "3", dp, tp, zero_stage=zero, max_steps=4, **fields)
    curve(at(2, 2, 3), 4, should_stop=stop)
    fields |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    curve(at(3, 1, 2), 3, should_stop=stop)
    fields["per_device_train_batch_size"] = ROWS
    curve(at(1, 3, 1), 3)
    assert_same_curve(metrics(tmp_path / "3" / "out"), expected)
    for name, array in tensors(tmp_path / "3" / "out" / "checkpoint-4").items():
        np.testing.assert_allclose(array, weights[name], atol=2e-4 * np.abs(weights[name]).max(), err_msg=name)


def stop() -> bool:
    """Ends a run after its first step."""
    return True


def test_a_rank_holds_its_own_part(tmp_path, monkeypatch):
    """After a pass, pages of other ranks' weights and of all gradients are free: they are zeros."""
    made = []
    plain = trainer.native_executable
    monkeypatch.setattr(trainer, "native_executable", lambda *given: made.append(plain(*given)) or made[-1])
    curve(wide(tmp_path, zero_stage=3, max_steps=1, per_device_train_batch_size=3, save_steps=0), 2)
    assert len(made) == 2
    for e in made:
        (begin, end), size = e._owned[e.ranks.data.rank], e.parameters.flat.size
        others = np.r_[0:begin, end:size]
        assert np.count_nonzero(e.parameters.flat[begin:end]) > 0.9 * (end - begin)
        assert np.count_nonzero(e.parameters.flat[others]) < 0.6 * len(others)  # edges of pages stay
        assert np.count_nonzero(e.gradients.flat) < 0.6 * size
        assert e.gradient_share.size == end - begin
