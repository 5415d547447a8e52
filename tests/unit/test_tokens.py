"""Tokenizers, streaming detokenisation and chat templates, against sentencepiece, the tokenizers library, and their
own laws.
"""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

import ckdist
from ckdist.errors import CkdistError, ModelFileError, RequestError
from ckdist.tokens.splits import SPLITS
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
from tests.support.paths import GOLDEN as GOLDEN_FILES

GOLDEN = GOLDEN_FILES / "tokens"
TEXTS = [
    "",
    " ",
    "def f(x):\n    return  x\n\n",
    "  leading and trailing  ",
    "it's we'LL 12345 3.14",
    "日本語 テスト",
    "👩‍👩‍👧 😀🎉 naïve",
    "é\u0301 e\u0301",
    "\r\n\t x\u00a0y",
    "camelCase HTTPServer !!!\n\n;",
    "a" * 300,
    "\ufffd kept",
    "<|end|> in text",
]


@pytest.fixture(scope="module")
def backend():
    """A small byte-level BPE with Llama 3's split, trained here."""
    made = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLITS["llama-bpe"].patterns[0]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), *TEXTS], trainer)
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return made


@pytest.fixture(scope="module")
def folder(backend, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    backend.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<|begin|>"},
        "eos_token": "<|end|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return path


@pytest.fixture(scope="module")
def byte_level(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece():
    return tokenizer_from_gguf(golden("bpe_space")["metadata"])


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def gguf_metadata(backend, **changes):
    """The metadata that a conversion of `backend` to GGUF would write."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }


def streamed(tokenizer, ids, skip_special=True):
    decoder = tokenizer.decoder(skip_special)
    return "".join([decoder.step(i) for i in ids]) + decoder.flush()


def test_folder_encodes_and_decodes_as_the_library(backend, byte_level):
    for text in TEXTS:
        ids = byte_level.encode(text)
        assert ids == backend.encode(text).ids
        assert byte_level.encode(text, add_special=False) == backend.encode(text, add_special_tokens=False).ids
        assert byte_level.decode(ids) == backend.decode(ids)
        assert byte_level.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)
        assert b"".join(map(byte_level.token_bytes, ids[1:])) == text.encode()


def test_folder_rules(byte_level):
    assert (byte_level.bos_token_id, byte_level.eos_token_ids, byte_level.vocab_size) == (0, {1, 7}, 600)
    assert byte_level.encode("<|begin|>x") == byte_level.encode("x"), "a BOS in the text is not doubled"
    assert (
        byte_level.token_text(1) == "<|end|>"
        and byte_level.token_bytes(10**9) == b""
        and byte_level.token_bytes(-1) == b""
    )
    with pytest.raises(RequestError, match="valid Unicode"):
        byte_level.encode("\ud800")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_add_bos_token_goes_before_the_post_processor(folder, tmp_path, adds_bos):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>", "add_bos_token": adds_bos}))
    assert load_tokenizer(tmp_path).prefix == ((0,) if adds_bos else ())


def test_gguf_byte_level_is_the_same_tokenizer(backend, byte_level):
    rebuilt = tokenizer_from_gguf(
        gguf_metadata(
            backend, **{"tokenizer.chat_template": "{{ eos_token }}", "tokenizer.chat_template.tool_use": "t"}
        )
    )
    for text in TEXTS:
        assert rebuilt.encode(text) == byte_level.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == byte_level.decode(byte_level.encode(text))
    assert rebuilt.eos_token_ids == {1} and rebuilt.special_ids == {0, 1} and rebuilt.pieces == byte_level.pieces
    assert rebuilt.chat_template.render([]) == "<|end|>"
    assert set(rebuilt.chat_template.sources) == {"default", "tool_use"}


def test_every_split_compiles_and_loses_nothing(backend, caplog):
    for name in (name for name, split in SPLITS.items() if not split.visible_space):
        tokenizer = tokenizer_from_gguf(gguf_metadata(backend, **{"tokenizer.ggml.pre": name}))
        for text in TEXTS[:8]:
            assert tokenizer.decode(tokenizer.encode(text)) in (
                text,
                tokenizer.backend.normalizer and tokenizer.backend.normalizer.normalize_str(text),
            )
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "I'LL 12345  x\n\n y", ["I", "'LL", " ", "123", "45", " ", " x", "\n\n", " y"]),
        ("qwen2", "don't 123 日本!", ["don", "'t", " ", "1", "2", "3", " 日本", "!"]),
        ("gpt-2", "don't 123  x", ["don", "'t", " 123", " ", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("tekken", "camelCase HTTP1/\n", ["camel", "Case", " HTTP", "1", "/\n"]),
        ("gpt-4o", "It's 1234", ["It's", " ", "123", "4"]),
        ("deepseek-v3", "x=1234日本", ["x", "=", "123", "4", "日本"]),
        ("falcon", "a+1234", ["a", "+", "123", "4"]),
    ],
)
def test_splits(name, text, pieces):
    split = SPLITS[name]
    spans = [span for _, span in split.pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


@pytest.mark.parametrize("name", ["bpe", "bpe_space", "unigram", "unigram_space"])
def test_sentencepiece_agrees_with_sentencepiece(name):
    data = golden(name)
    tokenizer = tokenizer_from_gguf(data["metadata"])
    assert tokenizer.prefix == (1,) and tokenizer.strips_prefix_space == name.endswith("space")
    for text, ids in data["cases"]:
        assert tokenizer.encode(text, add_special=False) == ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_joins_the_leftmost_of_equal_scores():
    """Mistral's runs of spaces all have one score and none has 15; sentencepiece makes 16 of the first 18 spaces,
    then 2.
    """
    tokens = ["<unk>", "<s>", "</s>", *("\u2581" * n for n in [*range(1, 15), 16])]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 3 + [-1e9] * (len(tokens) - 3),
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    for spaces, runs in ((18, [16, 2]), (31, [16, 14, 1]), (34, [16, 16, 2])):
        assert [len(tokens[i]) for i in tokenizer.encode(" " * spaces, add_special=False)] == runs


def test_sentencepiece_spaces_and_special_tokens(sentencepiece):
    ids = sentencepiece.encode("hello<turn>hello<tool>")
    turn, tool = (sentencepiece.pieces.index(piece) for piece in (b"<turn>", b"<tool>"))
    assert ids[0] == 1 and turn in ids and ids[-1] == tool
    assert sentencepiece.decode(ids) == "hello hello<tool>", "a control token is left out, a user-defined one is text"
    continuation = sentencepiece.encode("hello", add_special=False)
    assert sentencepiece.decode(continuation) == " hello", "what does not start with BOS keeps its space"
    assert sentencepiece.decode([1, *continuation]) == "hello"


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(-1, 700), max_size=30))
def test_stream_equals_decode_and_text_survives(byte_level, sentencepiece, text, ids):
    for tokenizer in (byte_level, sentencepiece):
        encoded = tokenizer.encode(text)
        assert streamed(tokenizer, encoded, False) == tokenizer.decode(encoded, False)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert byte_level.decode(byte_level.encode(text, False), False) == text
    assert byte_level.decode(ids) == byte_level.backend.decode([i for i in ids if 0 <= i < 600])


def test_stream_never_gives_half_a_character(byte_level):
    text = "a😀é日"
    decoder = byte_level.decoder()
    steps = [decoder.step(byte_level.pieces.index(bytes([byte]))) for byte in text.encode()]
    assert [step for step in steps if step] == list(text) and decoder.flush() == ""
    decoder.step(byte_level.pieces.index(b"\xf0"))
    assert decoder.flush() == "\ufffd"


def test_the_bundled_model_chats():
    tokenizer = load_tokenizer(Path(ckdist.__file__).parent / "models" / "bundled")
    prompt = tokenizer.chat_template.render([{"role": "user", "content": "What does len do?"}])
    ids = tokenizer.encode(prompt, add_special=False)
    assert prompt.endswith("<|end|>\n<|assistant|>\n") and ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1
    assert tokenizer.eos_token_ids == {ids[0], tokenizer.backend.token_to_id("<|end|>")}
    assert tokenizer.decode(ids) == "\nWhat does len do?\n\n"


def test_what_is_no_tokenizer_is_one_line(folder, tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)
    for content in (b"", b"{}", b"[" * 100_000, b'{"version":"1.0","model":{"type":"BPE"}}', b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelFileError) as error:
            load_tokenizer(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ModelFileError, match=r"config.json is not JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is a kind of vocabulary that ckdist does not read"),
        ({"tokens": []}, "has 0 entries"),
        ({"tokens": [1, 2]}, "is not an array of str"),
        ({"token_type": [1]}, "has 1 entries for 600 tokens"),
        ({"scores": "abc"}, "is not an array of float"),
        ({"model": []}, "is not known"),
        ({"scores": [float("nan")] * 600}, "not finite"),
        ({"merges": ["a b c"]}, "not two tokens"),
        ({"merges": []}, "merges is missing"),
        ({"add_bos_token": "yes"}, "not true or false"),
    ],
)
def test_hostile_gguf_metadata(backend, changes, message):
    with pytest.raises(ModelFileError, match=message):
        tokenizer_from_gguf(
            gguf_metadata(backend, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()})
        )
    assert tokenizer_from_gguf(gguf_metadata(backend, **{"tokenizer.ggml.bos_token_id": 10**9})).bos_token_id is None


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["tokens", "scores", "token_type", "merges", "bos_token_id", "add_bos_token", "pre", "model"]),
        st.one_of(
            st.integers(),
            st.booleans(),
            st.text(max_size=4),
            st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=3), st.floats()), max_size=5),
        ),
    )
)
def test_random_metadata_is_a_tokenizer_or_an_error(changes):
    metadata = golden("bpe")["metadata"] | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    try:
        tokenizer_from_gguf(metadata).encode("some text")
    except CkdistError as error:
        assert "\n" not in str(error)


def test_added_tokens_with_spaces(backend, tmp_path):
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.add_tokens([AddedToken("two words", normalized=False)])
    copy.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("say two words")
    assert (
        tokenizer.token_bytes(ids[-1]) == b"two words" and tokenizer.decode(ids) == copy.decode(ids) == "say two words"
    )
