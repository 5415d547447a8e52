"""Folders whose vocabulary is a file of tiktoken's ranks: ids against tiktoken's own, and what is refused."""

import json
import shutil

import pytest

from ckdist.errors import ModelFileError
from ckdist.hub.file_choice import choose_files
from ckdist.tokens.confined import load_vocabulary
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
from ckdist.tokens.tokenizer_to_gguf import tokenizer_metadata
from tests.support.paths import GOLDEN

RANKS = GOLDEN / "tiktoken" / "tiktoken.model"
CASES = json.loads((GOLDEN / "tiktoken" / "cases.json").read_text(encoding="utf-8"))
FIRST, COUNT = min(map(int, CASES["special"])), 256  # special tokens
BYTES = [line for line in RANKS.read_bytes().splitlines() if int(line.split()[1]) < 256]


def config(**changes):
    tools = "<|tool_calls_section_begin|>"
    added = {i: {"content": text, "special": text != tools} for i, text in CASES["special"].items()}
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer"}
    code = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    return {"added_tokens_decoder": added, **names, **code, **changes}


def write_folder(path, ranks=None, model_type="kimi_k2", **changes):
    path.mkdir(exist_ok=True)
    if ranks is None:
        shutil.copyfile(RANKS, path / RANKS.name)
    else:
        (path / RANKS.name).write_bytes(ranks)
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": FIRST + 2}))
    (path / "tokenizer_config.json").write_text(json.dumps(config(**changes)))
    (path / "tokenization_kimi.py").write_text("raise SystemExit('this must never run')")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("kimi"))


def test_ids_of_tiktoken(folder):
    tokenizer = load_tokenizer(folder)
    for text, ids in CASES["cases"]:
        assert tokenizer.encode(text) == ids, text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.vocab_size == FIRST + COUNT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (FIRST, {FIRST + 1, FIRST + 2})
    ids = tokenizer.encode("a<|im_end|><|tool_calls_section_begin|>")
    assert tokenizer.decode(ids) == "a<|tool_calls_section_begin|>"
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert not tokenizer.special_ids & set(plain) and tokenizer.decode(plain) == "<|im_end|>"


def test_the_process_with_limits_finds_the_same(folder):
    assert list(load_vocabulary(folder).pieces) == load_tokenizer(folder).pieces


def test_as_gguf(folder):
    """Under the name of its own split."""
    metadata = tokenizer_metadata(folder, FIRST + COUNT)
    assert metadata["tokenizer.ggml.pre"] == "kimi-k2"
    again = tokenizer_from_gguf(metadata)
    for text, ids in CASES["cases"]:
        assert again.encode(text) == ids, text


def test_a_tokenizer_json_goes_before(folder, tmp_path):
    both = write_folder(tmp_path / "both", ranks=b"not ranks")
    load_tokenizer(folder).backend.save(str(both / "tokenizer.json"))
    for text, ids in CASES["cases"]:
        assert load_tokenizer(both).encode(text) == ids, text


def test_it_is_fetched_and_its_code_is_not():
    names = ["config.json", "tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json", "model.safetensors"]
    assert set(choose_files(names, "", "someone/kimi")) == {*names} - {"tokenization_kimi.py"}


@pytest.mark.parametrize("model_type", ["qwen", None, ["kimi_k2"]])
def test_an_unknown_split_is_refused(tmp_path, model_type):
    with pytest.raises(ModelFileError, match="it is not known") as refused:
        load_tokenizer(write_folder(tmp_path, model_type=model_type))
    assert "\n" not in str(refused.value) and "kimi_k2" in str(refused.value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda lines: lines[:255], "no token for 1 bytes, such as 0xff"),
        (lambda lines: [], "line 1: ''"),
        (lambda lines: [*lines, b"YWI= 256", b"YWI= 257"], "258 lines and 257 different tokens"),
        (lambda lines: [*lines, b"YWI= 255"], "line 257: rank 255 is there twice"),
        (lambda lines: [*lines, b"YWI= 9999999"], "line 257: rank 9999999"),
        (lambda lines: [*lines, b"YWI= -1"], "line 257: 'YWI= -1'"),
        (lambda lines: [*lines, b"YWI 256"], "line 257: 'YWI 256'"),
        (lambda lines: [*lines, b"YWI="], "line 257"),
        (lambda lines: [*lines, b"\xff\xfe 256"], "line 257"),
        (lambda lines: [*lines, b"", b"YWI= 256"], "line 257: ''"),
        (lambda lines: [*lines, b"YWFh" * 400 + b" 256"], "is not a token of 1 to 1024 bytes"),
    ],
)
def test_damaged_ranks(tmp_path, change, words):
    with pytest.raises(ModelFileError) as refused:
        load_tokenizer(write_folder(tmp_path, ranks=b"\n".join(change(BYTES)) + b"\n", added_tokens_decoder={}))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "added",
    [
        {str(FIRST - 1): {"content": "<|a|>"}},
        {str(FIRST + COUNT): {"content": "<|a|>"}},
        {"x": {"content": "<|a|>"}},
        {str(FIRST): {"content": ""}},
        {str(FIRST): "text"},
        {str(FIRST): {"content": "<|a|>"}, str(FIRST + 1): {"content": "<|a|>"}},
        {str(FIRST): {"content": "a"}},
    ],
)
def test_special_tokens_that_cannot_be(tmp_path, added):
    with pytest.raises(ModelFileError, match="fetch the model's files again") as refused:
        load_tokenizer(write_folder(tmp_path, added_tokens_decoder=added))
    assert "\n" not in str(refused.value)
