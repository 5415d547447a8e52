"""A training whose weights are bfloat16: it learns as with float32 weights, and its files have the same bits."""

from unittest import mock

import numpy as np
import pytest

from ckdist.errors import ConfigError
from ckdist.train import trainer
from ckdist.train.arena import assign, widened
from ckdist.train.checkpoint_parts import SavedTensors
from ckdist.weights.safetensors import read_safetensors
from tests.support.tiny_training import config

STEPS, RATE = 120, 3e-3  # bfloat16 loses many updates of the last steps without random rounding


def test_random_rounding_learns_as_float32_does(tmp_path):
    def trained(name: str, nearest: bool = False, **fields) -> float:
        (tmp_path / name).mkdir()
        c = config(tmp_path / name, max_steps=STEPS, learning_rate=RATE, save_steps=0, **fields)
        made, plain = [], trainer.native_executable

        def round_to_nearest(report) -> None:
            flat = made[0].parameters.flat
            codes = np.empty(flat.size, np.uint16)
            assign(codes, flat)
            flat[:] = widened(codes)

        with mock.patch.object(trainer, "native_executable", lambda *given: made.append(plain(*given)) or made[-1]):
            return trainer.train(c, round_to_nearest if nearest else None).eval_loss

    expected, lost = trained("float32"), trained("nearest", nearest=True)
    assert trained("random", weights_dtype="bfloat16") == pytest.approx(expected, rel=0.03)
    assert lost > 1.05 * expected
    saved = SavedTensors(tmp_path / "random" / "out" / f"checkpoint-{STEPS}")
    file = tmp_path / "random" / "out" / "model" / "model.safetensors"
    data = file.read_bytes()
    for name, tensor in read_safetensors(file).items():
        codes = np.frombuffer(data, np.uint16, tensor.nbytes // 2, tensor.offset).reshape(tensor.shape)
        assert tensor.dtype == "BF16"
        np.testing.assert_array_equal(widened(codes), saved(f"weights.{name}", tensor.shape), err_msg=name)


def test_a_frozen_base_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"weights_dtype \(bfloat16\) must be float32 with lora_r 8"):
        config(tmp_path, model_config={}, model_name_or_path="m", lora_r=8, weights_dtype="bfloat16")
