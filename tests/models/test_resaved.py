"""Models whose config.json is as transformers saves it or as it is published, against logits of the models before."""

import json

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.single import SingleSequence
from tests.support.paths import GOLDEN

SAVED = json.loads((GOLDEN / "configs" / "golden.json").read_text())


def with_config(folder, golden, config):
    """The weights of a golden model with this config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(golden / "model.safetensors")
    settings = EngineConfig(model=str(folder), threads=1, cache_type_k="f32", cache_type_v="f32")
    return load_model(settings, SingleWorld())


def assert_logits_of_a_decoder(model, golden):
    logits = SingleSequence(model.executable).feed(np.load(golden / "ids.npy"))
    expected = np.load(golden / "logits.npy")
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_mixture_of_experts_saved_by_transformers_5(tmp_path):
    golden = GOLDEN / "qwen3moe"
    assert "num_local_experts" in SAVED["qwen3moe"] and "num_experts" not in SAVED["qwen3moe"]
    assert_logits_of_a_decoder(with_config(tmp_path, golden, SAVED["qwen3moe"]), golden)


def test_t5_1_1_saved_by_transformers_5_keeps_the_scale_of_its_logits(tmp_path):
    golden = GOLDEN / "encoder_decoders" / "t5_gated"
    config = SAVED["encoder_decoders/t5_gated"]
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, False)
    model = with_config(tmp_path, golden, config)
    rows: list[np.ndarray] = []

    class Recorder(Sampler):
        def sample(self, logits, rows_of_batch):
            rows.append(logits[0].copy())
            return super().sample(logits, rows_of_batch)

    engine = Engine(model.executable, Recorder(model.spec.vocab_size), start_tokens=model.spec.start_tokens)
    engine.add(0, np.load(golden / "sources.npz")["0"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    expected = np.load(golden / "logits.npy")
    assert np.abs(np.array(rows) - expected).max() < 1e-4 * np.abs(expected).max()


def test_qwen_3_5_with_experts_as_it_is_published(tmp_path):
    """With the language part in an object of its own, and no size of a feed-forward that no layer has."""
    golden = GOLDEN / "qwen35moe"
    published = json.loads((GOLDEN / "configs" / "qwen35moe" / "published.json").read_text())
    tiny = json.loads((golden / "config.json").read_text())
    text = {name: tiny.get(name, value) for name, value in published["text_config"].items() if name != "layer_types"}
    assert "intermediate_size" not in text
    assert_logits_of_a_decoder(with_config(tmp_path, golden, {**published, "text_config": text}), golden)
