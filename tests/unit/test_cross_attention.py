"""The meaning of programs with an encoder, in numpy, against golden logits by transformers; and what is refused."""

import json
import shutil

import numpy as np
import pytest

from ckdist.errors import ModelFileError
from ckdist.layout import TENSOR
from ckdist.mesh import WHOLE, Mesh
from ckdist.models.decoder import forward
from ckdist.models.encoder import encode
from ckdist.models.registry import spec_from_config
from ckdist.program.tracer import trace
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from tests.support.interpreter import Interpreter
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "encoder_decoders"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["bart", "marian", "t5", "t5_gated"])
def test_the_interpreter_gives_golden_logits(name, ranks):
    stored = open_checkpoint(FOLDER / name)
    spec, mesh = stored.spec, Mesh({WHOLE: ranks}, 0)
    load = lambda weight: read_tensor(stored.tensors[weight])
    source = np.load(FOLDER / name / "sources.npz")["0"]
    greedy, logits = (np.load(FOLDER / name / f"{kind}.npy") for kind in ("greedy", "logits"))
    encoder = Interpreter(trace(encode, spec, TENSOR, mesh), spec, mesh, load)
    hidden = encoder.run(source)
    assert np.abs(hidden - np.load(FOLDER / name / "hidden.npy")).max() < 1e-4 * np.abs(hidden).max()
    decoder = Interpreter(trace(forward, spec, TENSOR, mesh), spec, mesh, load)
    for own, read in zip(decoder.contexts, encoder.contexts, strict=True):
        own.states |= {key: kv for key, kv in read.states.items() if key[0] >= spec.first_cross_cache}
    made = decoder.run([*spec.start_tokens, *greedy[0, :-1]])
    assert np.abs(made - logits).max() < 1e-4 * np.abs(logits).max()


@pytest.mark.parametrize(
    "name, fields, words",
    [
        ("t5", {"feed_forward_proj": "gated-swish-7"}, "feed_forward_proj"),
        ("t5", {"decoder_start_token_id": 91}, "decoder_start_token_id is 91"),
        ("bart", {"encoder_attention_heads": 5}, "divisible by encoder_attention_heads"),
        ("bart", {"encoder_attention_heads": 4}, "they share a cache"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("bart", {"activation_function": "sine"}, "activation_function"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
    ],
)
def test_wrong_fields(name, fields, words):
    config = json.loads((FOLDER / name / "config.json").read_text()) | fields
    with pytest.raises(ModelFileError, match=words):
        spec_from_config(config, "config.json")


def test_an_encoder_alone():
    config = json.loads((FOLDER / "t5" / "config.json").read_text()) | {"architectures": ["T5EncoderModel"]}
    spec = spec_from_config(config, "config.json")
    assert not spec.generates and spec.reads_whole and spec.encoder is None and spec.root == "encoder"


def test_two_sentencepiece_files_are_no_tokenizer(tmp_path):
    (tmp_path / "source.spm").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"source\.spm.* no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_what_decoding_begins_with_and_never_writes(tmp_path):
    """generation_config.json stands over config.json, as for transformers."""
    for name in ("bart", "marian"):
        folder = tmp_path / name
        shutil.copytree(FOLDER / name, folder)
        rules = {"decoder_start_token_id": 7, "bad_words_ids": [[9], [4, 5]], "num_beams": 4}
        rules |= {"forced_bos_token_id": 8} if name == "bart" else {}
        (folder / "generation_config.json").write_text(json.dumps(rules))
        spec = open_checkpoint(folder).spec
        found = spec.start_tokens, spec.banned_tokens
        assert found == (((7, 8), (9,)) if name == "bart" else ((7,), (1, 9)))  # padding is 1
    (folder / "generation_config.json").write_text('{"bad_words_ids": [[91]]}')
    with pytest.raises(ModelFileError, match="bad_words_ids is 91"):
        open_checkpoint(folder)
