"""GRPO: the loss beside TRL's, a reward that rises, sampled beside trained log-probabilities, ranks, stops, rewards."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckdist.errors import ConfigError
from ckdist.train.grpo_loss import advantages, grpo
from ckdist.train.methods import check_method
from ckdist.train.model import open_model
from ckdist.train.rewards import open_reward
from ckdist.train.rollouts import Rollouts, sampling_bytes
from ckdist.train.trainer import train
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config


@pytest.mark.parametrize("case, kl", [("plain", 0.0), ("kl", 0.3)])
def test_the_loss_and_its_gradient_are_trls(case, kl):
    with np.load(GOLDEN / "grpo.npz") as stored:
        golden = dict(stored)
    mask = golden["mask"]
    gains = advantages(golden["rewards"]).ravel()
    np.testing.assert_allclose(gains, golden["advantages"], rtol=1e-7)  # TRL counts in float32
    values = [golden[name][mask] for name in ("policy", "before", "reference")]
    each = np.repeat(golden["advantages"], mask.sum(axis=1))
    of = grpo(values[0], values[1], values[2] if kl else None, each, 0.2, kl)
    assert of.losses.sum() / mask.sum() == pytest.approx(float(golden[f"{case}/loss"]), rel=1e-12)
    np.testing.assert_allclose(of.slopes / mask.sum(), golden[f"{case}/gradient"][mask], rtol=1e-10, atol=1e-15)
    assert 0 < of.is_clipped.mean() < 0.5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    train(config(folder, max_steps=20, save_dtype="float32"))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} and {i}", "completion": f" are {2 * i}."}) + "\n" for i in range(8))
    )
    (folder / "score.py").write_text(
        "def digits(prompt, answer, expected):\n    return sum(c.isdigit() for c in answer) / max(1, len(answer))\n"
        "def odd(prompt, answer, expected):\n    return float('nan')\n"
    )
    return folder


def sampling(base, folder, **fields):
    folder.mkdir(exist_ok=True)
    common = {
        "model_config": {}, "model_name_or_path": str(base / "out" / "model"), "method": "grpo", "lora_r": 8,
        "train_file": (str(base / "prompts.jsonl"),), "lora_target_modules": ("all-linear",), "weight_decay": 0.0,
        "reward": f"{base / 'score.py'}:digits", "max_completion_length": 12, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 6, "save_steps": 2,
    }  # fmt: skip
    return config(folder, **common | fields)


def run(c, ranks=1, **more):
    reports = []
    run_threads(ranks, lambda world: train(c, reports.append if world.rank == 0 else None, world=world, **more))
    return reports


def test_the_reward_rises_on_the_engines_own_answers(base, tmp_path):
    c = sampling(base, tmp_path / "one")
    reports = run(c)
    rewards = [report.metrics["reward"] for report in reports]
    assert np.mean(rewards[-2:]) > rewards[0] + 0.1
    for report in reports:  # float32: sums in another order
        assert report.metrics["sampling/largest_difference"] < 5e-6
        assert report.metrics["clip_ratio"] == 0
    # Two ranks sample the same answers of the same weights, and a stop changes no bit.
    halved = run(sampling(base, tmp_path / "two", per_device_train_batch_size=2, max_steps=1), 2)
    assert halved[0].metrics["reward"] == pytest.approx(rewards[0], rel=1e-12)
    assert halved[0].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
    stopped = sampling(base, tmp_path / "stopped")
    first, rest = run(stopped, should_stop=iter([False, True]).__next__), run(stopped)
    assert [report.loss for report in first + rest] == [report.loss for report in reports]
    written = [Path(x.output_dir) / "adapter" / "adapter_model.safetensors" for x in (c, stopped)]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_iterations_are_clipped_and_the_divergence_is_of_the_base(base, tmp_path):
    c = sampling(base, tmp_path / "more", num_iterations=3, kl_coef=0.1, max_steps=2, epsilon=0.01, bf16=True)
    first, second = run(c)
    assert first.metrics["clip_ratio"] > 0
    assert first.metrics["kl"] > 0 and second.metrics["kl"] > 0
    assert second.metrics["sampling/largest_difference"] < 0.1


def test_rewards(base, tmp_path):
    assert open_reward("exact")("", " 4\n", "4") == 1
    number = open_reward(r"regex:#### (\d+)")
    assert [number("", text, "so #### 7") for text in ("#### 5 #### 7", "7", "#### 70")] == [1, 0, 0]
    for text, message in [
        ("best", "must be exact, regex:PATTERN or FILE.py:FUNCTION"), ("regex:(", "is no regular expression"),
        (f"{tmp_path}/no.py:f", "there is no file"), (f"{base / 'score.py'}:f", "has no function f"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            open_reward(text)
    with pytest.raises(ConfigError, match="returned nan for the answer"):
        run(sampling(base, tmp_path / "nan", reward=f"{base / 'score.py'}:odd"))
    for fields, message in [
        ({"lora_r": 0}, "method grpo needs lora_r"),
        ({"use_dora": True}, "use_dora .* is not supported with"),
        ({"validation_file": ("a",)}, "validation_file .* is not supported"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            train(sampling(base, tmp_path / "refused", **fields))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(2\) must be 1 .* the whole model: use replicas"):
        check_method(sampling(base, tmp_path / "tp", tensor_parallel_size=2), None)
    with pytest.raises(ConfigError, match=r"reward \(best\) has no effect with method sft"):
        replace(sampling(base, tmp_path / "sft"), method="sft", reward="best")


def test_the_engine_that_samples_takes_the_planned_memory(base, tmp_path):
    c = sampling(base, tmp_path)
    model = open_model(c)
    assert model.checkpoint is not None and model.lora is not None
    planned = sampling_bytes(c, model.checkpoint.path, model.lora)
    rollouts = Rollouts(c, model.checkpoint.path, model.lora, 1)
    taken = rollouts.model.weight_bytes + rollouts.model.executable.kv_bytes
    rollouts.close()
    assert 0.9 * planned < taken <= planned
