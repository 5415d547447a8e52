"""What max_length leaves of chats and texts."""

import numpy as np
import pytest

from ckdist.errors import ConfigError
from ckdist.train.data.token_cache import LINE_BITS, TokenCache
from ckdist.train.data.token_rows import Rows
from ckdist.train.data.truncation import count_truncated, describe_truncation


def cache_of(*flags: str) -> TokenCache:
    """A document for each text, of whose tokens those marked with 1 are learned. Document i is line i + 1."""
    starts = np.cumsum([0, *map(len, flags)])
    learned = np.array([int(flag) for flag in "".join(flags)], np.uint8)
    places = np.arange(1, len(flags) + 1) + (1 << LINE_BITS)
    tokens = np.arange(len(learned), dtype=np.uint16)
    is_chat = not learned.all()
    return TokenCache(tokens, starts, learned if is_chat else None, "", places, ("other.txt", "a.jsonl"))


def test_counts_are_those_of_the_rows():
    random = np.random.default_rng(0)
    flags = ["".join(random.choice(list("0001"), size)) + "1" for size in random.integers(1, 40, 1500)]
    cache = cache_of(*flags, "1" * 9)
    counts = count_truncated(cache, np.arange(cache.documents), 16)
    rows = Rows(cache, np.arange(cache.documents), 16, seed=0)
    kept = sum(int((rows.row(0, index)[1] >= 0).sum()) for index in range(rows.count(0)))
    texts = [len(text) for text in [*flags, "1" * 9] if "0" not in text]
    assert counts.targets == kept and counts.texts == len(texts)
    assert counts.answers - counts.lost == kept - sum(size - 1 for size in texts)
    assert counts.truncated == sum(len(flag) > 17 for flag in flags) and counts.longest == max(map(len, flags))


def test_a_cut_is_said_with_its_size_an_example_and_the_remedy():
    cache = cache_of("0001", "0" * 6 + "11", "0" * 9 + "1")
    (line,) = describe_truncation(count_truncated(cache, np.arange(3), 6), cache, 6, "train_file")
    assert line == (
        "train_file: 2 of 3 chats are longer than max_length (6) and are truncated, as a.jsonl:2 with 8 tokens: "
        "2 of 4 tokens of answers are lost, all of 1 chats; set max_length to 10 to keep them"
    )
    assert describe_truncation(count_truncated(cache, np.arange(3), 10), cache, 10, "train_file") == []


@pytest.mark.parametrize(
    "flags, said",
    [
        (["0" * 8 + "1", "0" * 9 + "1"], "train_file has no answer left to learn: 2 of 2 chats are longer"),
        (["0" * 8 + "1", "11"], "train_file has no answer left to learn: 1 of 1 chats are longer"),
        (["1", "1"], "train_file has no token to learn: every document is a single token"),
    ],
)
def test_data_without_a_learned_token_is_refused(flags, said):
    cache = cache_of(*flags)
    with pytest.raises(ConfigError) as caught:
        describe_truncation(count_truncated(cache, np.arange(len(flags)), 4), cache, 4, "train_file")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_texts_that_are_learned_in_parts_are_counted():
    cache = cache_of("1" * 9, "11")
    counts = count_truncated(cache, np.arange(2), 4)
    assert (counts.divided, counts.texts, counts.targets) == (1, 2, 9) and not describe_truncation(
        counts, cache, 4, "train_file"
    )
