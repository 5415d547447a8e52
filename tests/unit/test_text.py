"""Stop strings over a token stream: what is given out depends on the characters alone, and nothing of a stop string
shows.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.engine.text import TextStream, check_stop
from ckdist.errors import RequestError


class Pieces:
    """A decoder whose tokens are the pieces themselves."""

    def __init__(self, rest=""):
        self.rest = rest

    def step(self, piece):
        return piece

    def flush(self):
        return self.rest


def plain(text: str, stops) -> tuple[str, str | None]:
    """The definition: the stop that is complete first, of several the longest, and the text before it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\u00e9", max_size=4), max_size=12),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=3),
    st.text("ab", max_size=2),
)
def test_as_defined_however_it_is_cut(pieces, stops, rest):
    stream = TextStream(Pieces(rest), stops)
    given_out, seen = "", ""
    for piece in pieces:
        given_out += stream.step(piece)
        seen += piece
        text, stop = plain(seen, stops)
        assert stream.stopped == stop
        assert text.startswith(given_out) and (stop is None or given_out == text)
        held = text[len(given_out) :]
        assert not held or any(s.startswith(held) for s in stops), "text is held back that begins no stop string"
    given_out += stream.flush()
    assert (given_out, stream.stopped) == plain(seen + rest, stops)
    assert stream.stopped is None or stream.step("a") + stream.flush() == ""


def test_held_text_comes_when_it_turns_out_to_be_none():
    stream = TextStream(Pieces(), ["\n\nUser:"])
    assert [stream.step(piece) for piece in ["Yes.\n", "\nUs", "e it", "\n\n"]] == ["Yes.", "", "\n\nUse it", ""]
    assert stream.flush() == "\n\n"


def test_refuses_impossible_stop_strings():
    assert check_stop(None) == () and check_stop("a") == ("a",) and check_stop(["a", "b"]) == ("a", "b")
    for stop in ([""], ["a"] * 17, ["a" * 1025], [3]):
        with pytest.raises(RequestError):
            check_stop(stop)
