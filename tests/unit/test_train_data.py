"""From files to packed batches: what is read, what is refused, what is learned, and who reads which part."""

import contextlib
import json
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError
from ckdist.tokens import text_process
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.train.batch import PackedBatch
from ckdist.train.data.batches import FileBatches, OwnBatches, Position
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.data_files import find_files
from ckdist.train.data.token_cache import TokenCache, open_cache
from ckdist.train.data.token_rows import Rows, split


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED)


@pytest.fixture(scope="module")
def chats():
    with contextlib.closing(ChatProcess(BUNDLED)) as process:
        yield process


def jsonl(tmp_path, *records) -> list:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return [path]


def test_texts_begin_and_end_with_their_tokens_and_are_cached(tmp_path, tokenizer, chats):
    long = "".join(f"line {i} of a long text\n" for i in range(6000))
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text("short")
    files = find_files([str(tmp_path / "*.txt")])
    cache = open_cache(tmp_path / "cache", files, tokenizer, "text", "error", chats.write)
    assert cache.documents == 4 and cache.learned is None and cache.tokens.dtype == np.uint16
    first = cache.tokens[: cache.starts[3]]
    assert first[0] == first[-1] == 0 and (first[1:-1] != 0).all(), "one text in three pieces has one BOS and one end"
    assert tokenizer.decode(first.tolist()) == long
    again = open_cache(tmp_path / "cache", files, tokenizer, "text", "error", chats.write)
    assert again.digest == cache.digest and len(list((tmp_path / "cache").iterdir())) == 1
    (tmp_path / "b.txt").write_text("another")
    assert open_cache(tmp_path / "cache", files, tokenizer, "text", "error", chats.write).digest != cache.digest


def test_bad_lines_are_named_or_counted(tmp_path, tokenizer, chats, caplog):
    files = jsonl(
        tmp_path,
        {"text": "fine"},
        "{not json",
        {"other": 1},
        {"text": 3},
        {"messages": []},
        {"messages": [{"role": "user", "content": "?"}]},
        '{"text": "\\ud800"}',
    )
    with pytest.raises(ConfigError, match=r"data.jsonl:2 is not JSON.*bad_lines = \"skip\""):
        open_cache(tmp_path / "new" / "cache", files, tokenizer, "text", "error", chats.write)
    assert not (tmp_path / "new").exists()
    with caplog.at_level(logging.WARNING):
        cache = open_cache(tmp_path / "cache", files, tokenizer, "text", "skip", chats.write)
    assert cache.report.skipped == 6 and cache.documents == 1
    assert "data.jsonl:3 has no text in 'text'" in caplog.text and "6 lines in all" in caplog.text
    caplog.clear()
    open_cache(tmp_path / "cache", files, tokenizer, "text", "skip", chats.write, progress=True)
    assert "6 lines in all were left out when these tokens were made" in caplog.text
    (tmp_path / "bad.txt").write_bytes(b"one\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"bad.txt:2 byte 0 is not UTF-8"):
        open_cache(tmp_path / "cache", [tmp_path / "bad.txt"], tokenizer, "text", "error", chats.write)
    with pytest.raises(ConfigError, match="no data file is at"):
        find_files([str(tmp_path / "*.none")])


def test_loss_is_on_the_assistants_turns_alone(tmp_path, tokenizer, chats):
    messages = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "That."},
    ]
    cache = open_cache(
        tmp_path / "cache", jsonl(tmp_path, {"messages": messages}), tokenizer, "text", "error", chats.write
    )
    learned = np.asarray(cache.tokens)[np.asarray(cache.learned) == 1]
    assert tokenizer.decode(learned.tolist(), skip_special=False) == "This.<|end|>That.<|end|>"
    ids, targets, starts = Rows(cache, np.arange(1), 512, seed=0).row(0, 0)
    assert starts == [0] and targets[targets >= 0].tolist() == learned.tolist()
    np.testing.assert_array_equal(targets[:-1][targets[:-1] >= 0], ids[1:][targets[:-1] >= 0])


LOOPS_ON_A_WORD = """{%- for message in messages %}{%- if 'loop' in message.content %}
{%- for a in range(99999) %}{%- for b in range(99999) %}{%- endfor %}{%- endfor %}{%- endif %}
{{- message.role + ': ' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""


def test_a_template_that_never_ends_costs_its_own_chat_alone(tmp_path, caplog, monkeypatch):
    """It is rendered in a process with limits, on many chats at a time."""
    monkeypatch.setattr(text_process, "CPU_SECONDS", 0.1)
    shutil.copytree(BUNDLED, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(LOOPS_ON_A_WORD)
    tokenizer = load_tokenizer(tmp_path / "model")
    chat = lambda text: {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
    files = jsonl(tmp_path, chat("one"), chat("loop"), chat("two"))
    with contextlib.closing(ChatProcess(tmp_path / "model")) as chats:
        with caplog.at_level(logging.WARNING):
            cache = open_cache(tmp_path / "cache", files, tokenizer, "text", "skip", chats.write)
        assert cache.documents == 2 and cache.report.skipped == 1
        assert "data.jsonl:2 is a chat that cannot be written: the model's chat template takes too much" in caplog.text


def test_chats_without_a_template_are_refused(tmp_path, tokenizer, chats):
    messages = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "yes"}]
    files = jsonl(tmp_path, {"messages": messages})
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        open_cache(tmp_path, files, replace(tokenizer, templates={}), "text", "error", chats.write)


def test_parquet_rows(tmp_path, tokenizer, chats):
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"content": ["one", "two", None], "n": [1, 2, 3]}), path)
    cache = open_cache(tmp_path / "cache", [path], tokenizer, "content", "skip", chats.write)
    assert cache.documents == 2 and cache.report.skipped == 1
    with pytest.raises(ConfigError, match=r"a.parquet:3 has no text in 'content'"):
        open_cache(tmp_path / "cache", [path], tokenizer, "content", "error", chats.write)
    with pytest.raises(ConfigError, match=r"has no text in 'text' and no chat; its keys are content, n: give messages"):
        open_cache(tmp_path / "cache", [path], tokenizer, "text", "error", chats.write)


def made_up(lengths, chats: int = 0) -> TokenCache:
    """Token i of the whole is i + 1, so every pair of a token and its target can be told.

    The first `chats` documents are chats.
    """
    starts = np.cumsum([0, *lengths])
    tokens = np.arange(1, starts[-1] + 1, dtype=np.uint32)
    learned = np.ones(starts[-1], np.uint8)
    learned[starts[:chats]] = 0
    return TokenCache(tokens, starts, learned if chats else None, "", np.arange(len(lengths)), ("a.jsonl",))


def pairs(batches) -> list[tuple[int, int]]:
    found = []
    for batch in batches:
        assert batch.starts[0] == 0 and batch.starts[-1] == len(batch.token_ids) and (np.diff(batch.starts) > 0).all()
        kept = batch.targets >= 0
        found += zip(batch.token_ids[kept].tolist(), batch.targets[kept].tolist(), strict=True)
    return found


@pytest.mark.parametrize("chats", [0, 20, 50])
@pytest.mark.parametrize("ranks, per_device, accumulation", [(1, 3, 1), (2, 2, 2), (3, 1, 2), (5, 1, 4)])
def test_an_epoch_is_every_pair_once_on_any_number_of_ranks(ranks, per_device, accumulation, chats):
    lengths = np.random.default_rng(0).integers(1, 60, 50)
    cache = made_up(lengths, chats)
    documents = list(zip(cache.starts[:-1], cache.starts[1:], strict=True))
    # Texts are learned to their end; of a chat what fits in a row is, and the token behind that is still a target.
    ends = [min(end, begin + 33) if index < chats else end for index, (begin, end) in enumerate(documents)]
    expected = {(t + 1, t + 2) for (begin, _), end in zip(documents, ends, strict=True) for t in range(begin, end - 1)}
    found = []
    for rank in range(ranks):
        source = FileBatches(Rows(cache, np.arange(50), 32, seed=3), rank, ranks, per_device, accumulation)
        steps = source.steps_left(1.0)
        for _ in range(steps):
            assert source.position.epoch == 0
            found += pairs(source.take())
        assert source.position == Position(1, 0)
    assert sorted(found) == sorted(expected)


def test_fewer_replicas_compute_the_rows_of_a_step_that_more_would():
    cache = made_up(np.random.default_rng(0).integers(1, 60, 50))

    def steps(ranks, **more):
        rows = Rows(cache, np.arange(50), 32, seed=3)
        sources = [FileBatches(rows, rank, ranks, 2, 2, **more) for rank in range(ranks)]
        count = sources[0].steps_left(1.0)
        return [sorted(pair for source in sources for pair in pairs(source.take())) for _ in range(count)]

    assert steps(2, replicas=3) == steps(1, replicas=3) == steps(3)


def test_a_place_in_the_data_gives_the_same_batches_again():
    rows = Rows(made_up([7, 40, 3, 90, 21]), np.arange(5), 16, seed=1)
    source = FileBatches(rows, 1, 2, 2, 1)
    taken = []
    for _ in range(9):
        at = source.position
        taken.append((at, source.take()))
    for at, batches in taken:
        again = FileBatches(Rows(rows.cache, np.arange(5), 16, seed=1), 1, 2, 2, 1)
        again.position = at
        for a, b in zip(batches, again.take(), strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.targets, b.targets)
            np.testing.assert_array_equal(a.starts, b.starts)
    first, second = (rows._lay_out(epoch)[0].tolist() for epoch in (0, 1))
    assert first != second or Rows(rows.cache, np.arange(5), 16, seed=2)._lay_out(0)[0].tolist() != first


def test_held_out_documents_are_the_seeds_choice():
    cache = made_up([4] * 40)
    train, held = split(cache, 10, seed=1)
    assert len(held) == 4 and not set(train) & set(held) and len(train) == 36
    assert split(cache, 10, seed=1)[1].tolist() == held.tolist() != split(cache, 10, seed=2)[1].tolist()
    assert len(split(made_up([4]), 50, seed=1)[1]) == 0


def test_own_batches_are_filled_and_checked():
    batch = lambda n: PackedBatch(np.arange(n), np.arange(n), np.array([0, n]))
    source = OwnBatches(lambda step, rank, size: [batch(5)] if step == 0 else [batch(9)], 0, 1, 8)
    (filled,) = source.take()
    assert (
        filled.token_ids.size == 8 and filled.targets[5:].tolist() == [-1] * 3 and filled.starts.tolist() == [0, 5, 8]
    )
    with pytest.raises(ConfigError, match=r"gave 9 token_ids.*at most 8"):
        source.take()
