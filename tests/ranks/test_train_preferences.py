"""Trainings of preferences from files: the same steps on one rank and on two, and after a stop."""

import json

import pytest

from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError
from ckdist.train.trainer import train
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import MODEL, config

COLOURS = ("red", "blue", "green", "pink", "grey", "black", "white", "gold")


def settings(folder, method: str, **fields):
    folder.mkdir(exist_ok=True)
    answer = lambda text: [{"role": "assistant", "content": text}]
    pairs = [
        {"prompt": [{"role": "user", "content": f"Say {c}."}], "chosen": answer(c), "rejected": answer(f"no {c}")}
        for c in COLOURS
    ]
    labels = [
        {"prompt": f"Say {c}.", "completion": text, "label": text == c} for c in COLOURS for text in (c, f"no {c}")
    ]
    data = folder.parent / f"{method}.jsonl"
    if not data.exists():  # the runs of a test share its tokens
        data.write_text("\n".join(map(json.dumps, labels if method == "kto" else pairs)))
    own = {
        "train_file": (str(data),),
        "cache_dir": str(folder.parent / "cache"),
        "model_config": MODEL | {"vocab_size": 4096},
        "tokenizer_name": str(BUNDLED),
    }
    own |= {"method": method, "per_device_train_batch_size": 4, "max_steps": 4, "max_length": 64}
    return config(folder, **own | {"save_steps": 2, "validation_split_percentage": 25.0, "eval_steps": 2} | fields)


def steps(c, ranks: int = 1, **more) -> list:
    reports: list = []
    run_threads(ranks, lambda world: train(c, reports.append if world.rank == 0 else None, world=world, **more))
    return reports


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_two_ranks_and_a_stop_change_nothing(tmp_path, method):
    whole = steps(settings(tmp_path / "whole", method))
    assert whole[-1].loss < whole[0].loss and whole[-1].metrics["rewards/margins"] > 0.05
    assert whole[-1].eval_loss is not None and whole[0].metrics["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    two = steps(settings(tmp_path / "two", method, per_device_train_batch_size=2), 2)
    for one, other in zip(whole, two, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-4)
        assert (other.eval_loss or 0) == pytest.approx(one.eval_loss or 0, rel=1e-4)
    c, stopped = settings(tmp_path / "parts", method), []
    parts = steps(c, should_stop=lambda: stopped.append(1) or len(stopped) == 2) + steps(c)
    assert [(r.loss, r.metrics, r.grad_norm) for r in parts] == [(r.loss, r.metrics, r.grad_norm) for r in whole]


def test_stages_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size \(2\) must be 1 for method dpo"):
        steps(settings(tmp_path, "dpo", pipeline_parallel_size=2), 2)
