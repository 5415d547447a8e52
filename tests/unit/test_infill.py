"""The prompt of a gap: the vocabulary's own tokens around what is before and behind it."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken

from ckdist.engine.messages import unpack_tokens
from ckdist.errors import RequestError
from ckdist.serve.requests.infill import infill_tokens, read_gap
from ckdist.serve.requests.prepare import completion, infill
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer_folder import load_tokenizer
from tests.support.served import write_tokenizer

FACTS = ModelFacts("m", 300, 64)
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def plain():
    with tempfile.TemporaryDirectory() as folder:
        yield load_tokenizer(write_tokenizer(Path(folder)))


@pytest.fixture(scope="module")
def tokenizer(plain):
    backend = plain.backend.from_str(plain.backend.to_str())
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return dataclasses.replace(plain, backend=backend)


def test_a_gap(tokenizer):
    before, behind, middle, file = map(tokenizer.backend.token_to_id, MARKS)
    a, b, c = (tokenizer.encode(letter, add_special=False)[0] for letter in "abc")
    gap, others = read_gap({"input_prefix": "ab", "input_suffix": "c", "prompt": "b", "n_predict": 3})
    assert others == {"n_predict": 3}
    assert infill_tokens(gap, tokenizer, FACTS) == [before, a, b, behind, c, middle, b]
    body = {"input_prefix": "", "input_suffix": "", "input_extra": [{"filename": "b", "text": "a"}]}
    newline = tokenizer.encode("\n", add_special=False)[0]
    assert infill_tokens(read_gap(body)[0], tokenizer, FACTS) == [file, b, newline, a, newline, before, behind, middle]
    marks = read_gap({"input_prefix": MARKS[2], "input_suffix": ""})[0]
    assert infill_tokens(marks, tokenizer, FACTS).count(middle) == 1  # a mark in the text is text
    prepared = infill({"input_prefix": "a", "input_suffix": "c", "n_predict": 2}, tokenizer, FACTS)
    assert list(unpack_tokens(prepared.prompts[0])) == [before, a, behind, c, middle] and prepared.max_tokens == [2]


def test_the_suffix_of_a_completion_is_the_text_behind_a_gap(tokenizer, plain):
    before, behind, middle, _ = map(tokenizer.backend.token_to_id, MARKS)
    a, c = (tokenizer.encode(letter, add_special=False)[0] for letter in "ac")
    prepared = completion({"prompt": ["a", "c"], "suffix": "c"}, tokenizer, FACTS)
    assert [list(unpack_tokens(prompt)) for prompt in prepared.prompts] == [
        [before, first, behind, c, middle] for first in (a, c)
    ]
    for body in ({"prompt": [5]}, {"prompt": "a", "echo": True}):
        with pytest.raises(RequestError, match="suffix needs prompts that are text, and no echo"):
            completion({**body, "suffix": "c"}, tokenizer, FACTS)
    with pytest.raises(RequestError, match="/infill") as error:
        completion({"prompt": "a", "suffix": "c"}, plain, FACTS)
    assert error.value.field == "suffix"


@pytest.mark.parametrize(
    "body, words",
    [
        ({"input_prefix": "a"}, "input_suffix is needed"),
        ({"input_suffix": "a"}, "input_prefix is needed"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": ["x"]}, "must hold objects"),
        ({"input_prefix": "a" * 9999, "input_suffix": "b"}, "exceeds the available context size"),
    ],
)
def test_wrong_gaps(tokenizer, body, words):
    with pytest.raises(RequestError, match=words):
        infill(body, tokenizer, FACTS)


def test_a_vocabulary_without_marks(plain):
    with pytest.raises(RequestError, match="no tokens for infill"):
        infill({"input_prefix": "a", "input_suffix": "b"}, plain, FACTS)
