"""The text of a stream of tokens, ended by stop strings. It needs only a decoder's `step` and `flush`.

Text that may begin a stop string is held back until that is decided. The text of a stop string is returned only on
request. The first complete stop string ends the text. If several complete at the same character, the longest counts. So
the text depends only on its characters, not on token boundaries.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckdist.errors import RequestError

if TYPE_CHECKING:  # processes of a server without an engine use this module too
    from ckdist.tokens.stream import StreamDecoder

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024


def check_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a request as a tuple. Raises RequestError if they are empty, too long or too many."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(strings)} stop strings are more than {MAX_STOP_STRINGS}; give fewer", "stop")
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string must have 1 to {MAX_STOP_CHARS} characters, not {str(string)[:40]!r}", "stop"
            )
    return strings


class StopString:
    """Finds one stop string in a text, a character at a time (Knuth, Morris, Pratt 1977)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # length of the longest suffix of the text that begins the string
        self._fallback = [0] * (len(string) + 1)  # [n]: the same for the proper suffixes of string[:n]
        length = 0
        for i in range(1, len(string)):
            while length and string[i] != string[length]:
                length = self._fallback[length]
            length += string[i] == string[length]
            self._fallback[i + 1] = length

    def step(self, character: str) -> bool:
        """Returns whether this character completes the string. Must not be called again after that."""
        string, matched = self.string, self.matched
        while matched and string[matched] != character:
            matched = self._fallback[matched]
        self.matched = matched = matched + (string[matched] == character)
        return matched == len(string)


class TextStream:
    """The text of one sequence, token by token.

    Args:
        stop: Stop strings. The first complete one ends the text.
        include_stop: Whether the text includes that stop string.
    """

    def __init__(self, decoder: "StreamDecoder", stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._decoder, self._include_stop = decoder, include_stop
        self._stops = [StopString(string) for string in stop]
        self._held = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def step(self, token: int) -> str:
        """Returns the text that is decided with this token. Always empty once `stopped`."""
        return "" if self.stopped is not None else self._push(self._decoder.step(token))

    def flush(self) -> str:
        """Returns the rest of the text after the sequence has ended."""
        if self.stopped is not None:
            return ""
        text = self._push(self._decoder.flush())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _push(self, piece: str) -> str:
        """Returns the text that is decided with `piece` and holds the rest back."""
        if not self._stops:
            return piece
        text, begin = self._held + piece, len(self._held)
        for i, character in enumerate(piece, begin + 1):
            complete = [stop.string for stop in self._stops if stop.step(character)]
            if complete:
                self.stopped, self._held = max(complete, key=len), ""
                return text[: i if self._include_stop else i - len(self.stopped)]
        keep = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]
