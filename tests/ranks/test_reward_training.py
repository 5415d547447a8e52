"""A reward model from pairs to a server's score: it is trained, written as a sequence classifier, and scored."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckdist import LLM
from ckdist.errors import ConfigError
from ckdist.train.trainer import train
from ckdist.weights.adapter import Adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.stored_pooling import stored_pooling
from ckdist.weights.stored_ranking import stored_ranking
from tests.support.paths import GOLDEN
from tests.support.tiny_training import config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base = config(tmp_path_factory.mktemp("base"), max_steps=2, save_dtype="float32")
    train(base)
    return f"{base.output_dir}/model"


@pytest.mark.parametrize("lora", [0, 4])
def test_a_reward_model_is_trained_and_scores(model, tmp_path, lora):
    pair = lambda i: {"prompt": f"{i} and {i}", "chosen": f" are {2 * i}.", "rejected": f" were {i}!"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair(i)) + "\n" for i in range(12)))
    (tmp_path / "reward").mkdir()
    fields = {"model_config": {}, "model_name_or_path": model, "train_file": (str(tmp_path / "pairs.jsonl"),)}
    fields |= {"method": "reward", "per_device_train_batch_size": 4, "learning_rate": 5e-3, "save_dtype": "float32"}
    fields |= {"lora_r": lora, "lora_alpha": 16.0, "lora_target_modules": ("all-linear",)} if lora else {}
    c, reports = config(tmp_path / "reward", validation_split_percentage=20.0, **fields), []
    train(c, reports.append)
    assert reports[-1].loss < 0.8 * reports[0].loss and reports[-1].metrics["accuracy"] == 1
    path, adapter = (model, f"{c.output_dir}/adapter") if lora else (f"{c.output_dir}/model", None)
    checkpoint = open_checkpoint(path)
    if adapter:
        checkpoint = replace(checkpoint, unread=(Adapter(Path(adapter), checkpoint.spec).head,))
    else:
        config_json = json.loads((checkpoint.folder / "config.json").read_text())
        assert config_json["architectures"] == ["LlamaForSequenceClassification"]
    assert stored_pooling(checkpoint) == "rank" and not checkpoint.notes
    with LLM(path, lora=adapter, threads=1) as llm:
        llm.engine.ranking = ranking = stored_ranking(checkpoint, llm.tokenizer)
        asked = lambda i, key: ranking.template.replace("{query}", f"{i} and {i}").replace("{document}", pair(i)[key])
        texts = [asked(i, key) for i in range(12) for key in ("chosen", "rejected")]
        scores = llm.embed([llm.tokenizer.encode(text) for text in texts], normalise=False).reshape(12, 2)
    losses = np.logaddexp(0, scores[:, 1] - scores[:, 0])
    held = [losses[list(some)].mean() for some in itertools.combinations(range(12), 3)]  # 20 % of 12 records
    assert np.abs(np.array(held) - reports[-1].eval_loss).min() < 1e-4
    assert (scores[:, 0] > scores[:, 1]).all()


@pytest.mark.parametrize("fields, message", [
    ({"model_name_or_path": str(GOLDEN / "gguf" / "BF16.gguf")}, "trains all weights of a folder with safetensors"),
])  # fmt: skip
def test_refusals(tmp_path, fields, message):
    common = {"model_config": {}, "model_name_or_path": str(GOLDEN / "llama3"), "method": "reward"}
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path, **common | fields))
