"""Per-layer embeddings: a table whose rows are read in the file, in the file's type, and never packed."""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.models.decoder import PER_LAYER
from ckdist.models.registry import spec_from_config
from ckdist.models.training_loss import loss
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dtypes import F32, Q4_K, Q8_0
from ckdist.weights.gguf_export import export_gguf
from tests.models.test_export import NEW, SIZES, write_stored

CONFIG = {"architectures": ["Gemma4ForCausalLM"], **SIZES, **NEW["Gemma4"], "hidden_size_per_layer_input": 64}
IDS = np.arange(40) * 7 % 290 + 4


def loaded_logits(path) -> tuple[np.ndarray, int]:
    """(the logits, the bytes of packed weights) of a model."""
    config = EngineConfig(model=str(path), cache_type_k="f32", cache_type_v="f32", threads=2, ubatch_size=48)
    loaded = load_model(config, SingleWorld())
    try:
        return SingleSequence(loaded.executable).feed(IDS), loaded.loader.planned_bytes
    finally:
        loaded.close()


def test_the_table_is_read_in_its_type_and_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", lambda *_: {})
    write_stored(tmp_path, CONFIG)
    plain, planned = loaded_logits(tmp_path)
    for kind, number in (("q8_0", Q8_0.number), ("q4_k", Q4_K.number)):
        export_gguf(str(tmp_path), str(tmp_path / "m.gguf"), kind)
        table = open_checkpoint(tmp_path / "m.gguf").tensors[PER_LAYER]
        assert table.type == number and table.shape == (300, 256)
        quantised, _ = loaded_logits(tmp_path / "m.gguf")
        assert np.sqrt(np.mean((quantised - plain) ** 2)) < 0.15 * np.sqrt(np.mean(plain**2))
    (larger := tmp_path / "larger").mkdir()
    write_stored(larger, CONFIG | {"vocab_size_per_layer_input": 3000})
    assert open_checkpoint(larger).tensors[PER_LAYER].type == F32.number
    assert loaded_logits(larger)[1] == planned


def test_a_model_whose_layers_share_values_is_not_trained():
    with pytest.raises(ConfigError, match="can be served, not trained"):
        loss(None, None, None, spec_from_config(CONFIG, "here"))
