"""One small training on any mesh: its configuration, its reports, and what two of them have in common."""

import json
import pathlib

import numpy as np
import pytest

from ckdist.train.checkpoint_parts import SavedTensors
from ckdist.train.trainer import train
from ckdist.weights.safetensors import read_safetensors
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import MODEL, config

WIDE = {**MODEL, "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 100}
WIDE |= {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": False}
ROWS = 6  # of a step, whatever the mesh


def wide(folder: pathlib.Path, dp: int = 1, tp: int = 1, **fields):
    """A configuration of the same training on any mesh."""
    folder.mkdir(exist_ok=True)
    batch = {"per_device_train_batch_size": ROWS // dp, "tensor_parallel_size": tp, "model_config": WIDE}
    return config(folder, eval_steps=4, save_dtype="float32", **batch | fields)


def curve(c, ranks: int, **more) -> list:
    """The reports of every step."""
    reports: list = []
    run_threads(ranks, lambda world: train(c, reports.append if world.rank == 0 else None, world=world, **more))
    return reports


def tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, or those of a model or file in float32."""
    if (path / "training").is_dir():
        saved = SavedTensors(path)
        return {name: saved(name, shape) for name, shape in saved.shapes.items()}
    file = path if path.is_file() else path / "model.safetensors"
    data = file.read_bytes()
    return {
        name: np.frombuffer(data, np.float32, tensor.nbytes // 4, tensor.offset).reshape(tensor.shape)
        for name, tensor in read_safetensors(file).items()
    }


def metrics(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_same_curve(found: list[dict], expected: list[dict]) -> None:
    """Losses to 1e-5."""
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for one, other in zip(expected, found, strict=True):
        assert other["tokens"] == one["tokens"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        for name in {"aux_loss", "eval_loss"} & set(one):
            assert other[name] == pytest.approx(one[name], rel=1e-5)


def assert_same_tensors(found: pathlib.Path, expected: pathlib.Path) -> None:
    """Fails if tensors of two folders differ by more than sums in another order do."""
    ours, theirs = tensors(found), tensors(expected)
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert ours[name].shape == array.shape
        atol = 2e-4 * max(np.abs(array).max(), 1e-12)
        np.testing.assert_allclose(ours[name], array, atol=atol, rtol=1e-3, err_msg=f"{found}: {name}")
