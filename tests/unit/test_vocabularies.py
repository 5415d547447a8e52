"""Every pre-tokenizer name and kind of vocabulary of GGUF: ids against another engine's and llama.cpp's, and what is
refused.
"""

import json
import random
import threading
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers

from ckdist.errors import ModelFileError
from ckdist.tokens.scored_merges import scored_merges
from ckdist.tokens.splits import SPLITS
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
from tests.support.cases import cases
from tests.support.paths import GOLDEN as GOLDEN_FILES

GOLDEN = GOLDEN_FILES / "vocab"


@pytest.fixture(scope="module")
def vocab():
    return json.loads((GOLDEN / "vocab.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ids():
    return dict(np.load(GOLDEN / "ids.npz"))


def metadata(kind, tokens, merges, **keys):
    types = [
        6
        if token.startswith("<0x")
        else 3
        if kind == "bert" and token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
        else 1
        for token in tokens
    ]
    values = {"model": kind, "tokens": tokens, "token_type": types, "merges": merges, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def assert_alike(tokenizer, texts, ids, name):
    start = 0
    for text, count in zip(texts, ids[f"{name}.counts"].tolist(), strict=True):
        if count < 0:
            continue
        expected = ids[name][start : start + count].tolist()
        assert tokenizer.encode(text, add_special=False) == expected, text
        start += count
    assert start == len(ids[name]) > 500


GOLDEN_NAMES = {split: name for name, split in reversed(SPLITS.items())}


@cases("name", SPLITS)
def test_every_name_splits_as_published(vocab, ids, name):
    tokens, merges = vocab["visible_space" if SPLITS[name].visible_space else "byte_level"]
    tokenizer = tokenizer_from_gguf(metadata("gpt2", tokens, merges, pre=name))
    assert_alike(tokenizer, vocab["texts"], ids, GOLDEN_NAMES[SPLITS[name]])


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("tiny_aya", [r"\d{1,3}(?=(?:\d{3})*\b)"]),
        ("superbpe", [r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
        ("afmoe", [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"]),
    ],
)
def test_numbers_are_grouped_as_published_in_linear_time(name, published):
    """The published patterns try every place of a number against all that follow: 100,000 digits took 17 seconds and
    more.
    """
    ours = SPLITS[name].pre_tokenizer()
    rest = SPLITS[name].patterns[3:]
    theirs = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (*published, *rest)),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    rng = random.Random(3)
    for _ in range(2000):
        text = "".join(rng.choices("1234567890½²٣ax_ .\n-", weights=[3] * 10 + [1] * 10, k=rng.randrange(1, 24)))
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text
    for text in ("1" * 100_000, "1" * 100_000 + "a"):
        began = time.process_time()
        ours.pre_tokenize_str(text)
        assert time.process_time() - began < 5


def test_the_kinds_gemma4_and_bert(vocab, ids):
    gemma4 = tokenizer_from_gguf(metadata("gemma4", *vocab["visible_space"], bos_token_id=300, add_bos_token=False))
    assert_alike(gemma4, vocab["texts"], ids, "gemma4")
    assert gemma4.prefix == (300,)
    tokens = vocab["words"][0]
    special = {
        f"{name}_token_id": tokens.index(f"[{text}]")
        for name, text in (("unknown", "UNK"), ("bos", "CLS"), ("seperator", "SEP"))
    }
    bert = tokenizer_from_gguf(metadata("bert", tokens, [], **special))
    assert_alike(bert, vocab["texts"], ids, "bert")
    around = bert.encode("Trailing")
    assert (around[0], around[-1]) == (tokens.index("[CLS]"), tokens.index("[SEP]")) and bert.decode(
        around
    ) == "trailing"
    for text in ("a  b", "日本語 x\n", "👩‍👩‍👧 é"):
        assert gemma4.decode(gemma4.encode(text, add_special=False)) == text


@pytest.mark.parametrize("kind", ["rwkv", "plamo2", "none", "no_vocab", "whitespace", "hybriddna"])
def test_kinds_that_are_not_read_are_named(vocab, kind):
    with pytest.raises(
        ModelFileError,
        match=f"'{kind}' is a kind of vocabulary that ckdist does not read; known: gpt2, gemma4, llama, t5, bert",
    ):
        tokenizer_from_gguf(metadata(kind, *vocab["byte_level"]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {},
            (
                "tokenizer.ggml.pre is missing, .*--override-kv tokenizer.ggml.pre=str:NAME; .* llama-bpe for Llama "
                "3, qwen2"
            ),
        ),
        ({"pre": ""}, "tokenizer.ggml.pre is missing"),
        ({"pre": "tomorrow"}, "'tomorrow' is not known; if the model splits .*--override-kv"),
        ({"pre": "qwen-2"}, r"'qwen-2' is not known \(did you mean qwen2\?\);"),
        ({"pre": "whitespace"}, "'whitespace' is not known"),
        ({"pre": 3}, "tokenizer.ggml.pre is 3, not a name"),
    ],
)
def test_a_split_that_is_not_known_is_refused(vocab, keys, message):
    with pytest.raises(ModelFileError, match=message):
        tokenizer_from_gguf(metadata("gpt2", *vocab["byte_level"], **keys))


@pytest.fixture(scope="module")
def chat(vocab):
    """Metadata with control tokens, a user-defined one, and an end of turn that the file calls user-defined."""
    tokens, merges = vocab["byte_level"]
    made = metadata(
        "gpt2", [*tokens, "<|turn|>", "<tool>", "<|im_end|>", "</s>"], merges, pre="llama-bpe", bos_token_id=len(tokens)
    )
    made["tokenizer.ggml.token_type"][-4:] = [3, 4, 4, 4]
    return made


def test_control_tokens_can_be_plain_text(chat):
    tokenizer, first = tokenizer_from_gguf(chat), len(chat["tokenizer.ggml.tokens"]) - 4
    text = "<|turn|>a<tool>b<|im_end|></s>"
    parsed = tokenizer.encode(text, add_special=False)
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    assert [i for i in parsed if i >= first] == [first, first + 1, first + 2, first + 3]
    assert [i for i in plain if i >= first] == [first + 1], "user-defined tokens are found either way"
    assert tokenizer.decode(plain, skip_special=False) == text
    assert tokenizer.eos_token_ids == {first + 2} and first + 3 not in tokenizer.special_ids
    assert tokenizer.encode("x", parse_special=False)[0] == first, "BOS is put before plain text too"


def test_control_tokens_of_a_folder_can_be_plain_text(chat, tmp_path):
    backend = tokenizers.Tokenizer.from_str(tokenizer_from_gguf(chat).backend.to_str())
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    backend.add_special_tokens([AddedToken("<|later|>", special=True, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    think, later = backend.token_to_id("<think>"), backend.token_to_id("<|later|>")
    text = "<|later|>x<think>y<|turn|>"
    assert {think, later} < set(tokenizer.encode(text))
    plain = tokenizer.encode(text, parse_special=False)
    assert think in plain and later not in plain and tokenizer.decode(plain, skip_special=False) == text


def test_both_ways_of_encoding_from_many_threads(chat):
    tokenizer = tokenizer_from_gguf(chat)
    texts = [f"<|turn|>thread {i}<|im_end|>" for i in range(8)]
    expected = [(tokenizer.encode(text), tokenizer_from_gguf(chat).encode(text, parse_special=False)) for text in texts]
    results = {}

    def encode(i):
        results[i] = [(tokenizer.encode(texts[i]), tokenizer.encode(texts[i], parse_special=False)) for _ in range(50)]

    threads = [threading.Thread(target=encode, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(pair == expected[i] for i in range(8) for pair in results[i])


def test_a_mask_takes_the_spaces_before_it(vocab):
    tokens, merges = vocab["byte_level"]
    made = metadata("gpt2", [*tokens, "<mask>"], merges, pre="jina-v2-de")
    made["tokenizer.ggml.token_type"][-1] = 3
    assert tokenizer_from_gguf(made).encode("x  <mask>") == [tokens.index("x"), len(tokens)]


def test_merges_are_all_halves_by_score_then_from_the_left():
    draw = random.Random(1)
    tokens = ["".join(draw.choices("ab▁é😀", k=draw.choice((0, 1, 2, 3, 4, 70)))) for _ in range(400)]
    tokens += [f"{left}{right}" for left, right in zip(tokens, reversed(tokens), strict=True)]
    scores = {token: draw.choice((0.0, -1.0, -float(i))) for i, token in enumerate(tokens)}
    ids = {token: i for i, token in enumerate(scores)}
    expected = sorted(
        (-scores[token], -cut, ids[token[:cut]], ids[token[cut:]])
        for token in scores
        for cut in range(1, min(len(token), 65))
        if token[:cut] in scores and token[cut:] in scores
    )
    merges = scored_merges(scores, ids)
    assert [(ids[left], ids[right]) for left, right in merges] == [key[2:] for key in expected]
    assert len(merges) > 300


def test_end_ends_no_answer_beside_return_and_call(vocab):
    tokens, merges = vocab["byte_level"]
    names = ["<|end|>", "<|return|>", "<|call|>"]
    made = metadata("gpt2", [*tokens, *names], merges, pre="gpt-4o")
    made["tokenizer.ggml.token_type"][-3:] = [3] * 3
    assert tokenizer_from_gguf(made).eos_token_ids == {len(tokens) + 1, len(tokens) + 2}
