"""Calls of tools in an answer that grows."""

from types import SimpleNamespace

import pytest

from ckdist.serve import chat_message
from ckdist.serve.blocks import Blocks
from ckdist.serve.chat_message import ChatParser
from ckdist.serve.parsers.delta import Delta


class Scripted:
    """A parser that takes a text for arguments; "+" begins a call, "=" text after it."""

    def __init__(self, form):
        self.calls = -1

    def step(self, text: str) -> list[Delta]:
        if text == "+":
            self.calls += 1
            return [Delta(call=self.calls, name="f")]
        return [Delta(content=text)] if text[0] == "=" else [Delta(call=self.calls, arguments=text)]

    def flush(self) -> list[Delta]:
        return []


@pytest.mark.parametrize(
    "texts, cut",
    [
        (["+", '{"a"', ": 1}"], False),
        (["+", '{"a"'], True),
        (["+"], True),
        (["+", "{}", "+", '{"b'], True),
        ([], False),
    ],
)
def test_a_call_whose_arguments_are_not_whole_is_known(texts, cut, monkeypatch):
    monkeypatch.setattr(chat_message, "parser_of", Scripted)
    parser = ChatParser(SimpleNamespace(custom=()))
    for text in texts:
        parser.take(text, ended=False)
    assert parser.ends_in_call is cut and parser.calls == texts.count("+")


def test_text_after_a_custom_call_that_is_cut_off_is_a_block_of_its_own(monkeypatch):
    monkeypatch.setattr(chat_message, "parser_of", Scripted)
    parser, blocks = ChatParser(SimpleNamespace(custom=("f",))), Blocks()
    for text in ("+", '{"input": "a', "=b", ""):
        list(blocks.take(parser.take(text, ended=not text)))
    assert [(b.kind, b.name, b.custom, b.text) for b in blocks.all] == [
        ("call", "f", True, "a"),
        ("text", "", False, "=b"),
    ]
