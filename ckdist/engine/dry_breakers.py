"""DRY's sequence breakers as tokens of one vocabulary. DRY counts no repetition across a breaker."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from ckdist import native
from ckdist.engine.request import check_breakers
from ckdist.native import CData
from ckdist.tokens.tokenizer import Tokenizer

MAX_KEPT = 32  # sets of breakers


@dataclass(frozen=True)
class _Pieces:
    """The bytes of a vocabulary's tokens."""

    text: np.ndarray  # uint8, all tokens end to end
    begins: np.ndarray  # int64 (tokens + 1,), offsets in `text`
    byte_tokens: dict[int, int]  # byte -> the token of this byte alone

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> "_Pieces":
        """Joins the bytes of all tokens."""
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        singles = np.flatnonzero(lengths == 1)[::-1].tolist()  # the first of equal tokens counts
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls(np.frombuffer(b"".join(pieces) or b"\0", np.uint8), begins, {pieces[i][0]: i for i in singles})


class DryBreakers:
    """Finds the tokens that contain or begin breakers, in its own thread. It keeps the last MAX_KEPT sets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[str, ...], Future[CData]] = OrderedDict()
        self._pieces: _Pieces | None = None  # read with the first request
        self._thread = ThreadPoolExecutor(1, "ckdist-breakers")  # starts with the first request

    def find(self, breakers: Sequence[str]) -> Future[CData]:
        """Returns the future of a native ckdist_dry_breakers.

        Raises RequestError for breakers that `check_breakers` refuses.
        """
        breakers = tuple(dict.fromkeys(breakers))
        found = self._kept.get(breakers)
        if found is None:
            encoded = check_breakers(breakers)
            if len(self._kept) == MAX_KEPT:
                oldest = next((key for key, future in self._kept.items() if future.done()), next(iter(self._kept)))
                del self._kept[oldest]
            found = self._kept[breakers] = self._thread.submit(self._open, encoded)
        self._kept.move_to_end(breakers)
        return found

    def has_room(self, breakers: Sequence[str]) -> bool:
        """True if `find` knows the breakers, or fewer than MAX_KEPT sets are pending, so a flood is limited."""
        if tuple(dict.fromkeys(breakers)) in self._kept:
            return True
        return len(self._kept) < MAX_KEPT or any(found.done() for found in self._kept.values())

    def _open(self, breakers: list[bytes]) -> CData:
        """Makes a native ckdist_dry_breakers. Raises NativeError if that fails."""
        if self._pieces is None:
            self._pieces = _Pieces.of(self._tokenizer.pieces)
        pieces = self._pieces
        tails = self._tails(pieces, [breaker[i:] for breaker in breakers for i in range(1, len(breaker))])
        text, text_begins = _join(breakers, np.uint8)
        tail_tokens, tail_begins = _join(tails, np.int32)
        handle = native.lib.ckdist_dry_breakers_open(
            native.pointer(pieces.text, "uint8_t *"), native.pointer(pieces.begins, "int64_t *"),
            len(pieces.begins) - 1,
            native.pointer(text, "uint8_t *"), native.pointer(text_begins, "int64_t *"), len(breakers),
            native.pointer(tail_tokens, "int32_t *"), native.pointer(tail_begins, "int64_t *"),
        )  # fmt: skip
        if not handle:
            native.check(-5)
        return native.ffi.gc(handle, native.lib.ckdist_dry_breakers_close)

    def _tails(self, pieces: _Pieces, ends: list[bytes]) -> list[list[int]]:
        """The tokens of each end of a breaker, or [-1] if the vocabulary cannot spell it.

        An end that begins inside a character begins with single-byte tokens.
        """
        tails = []
        for end in ends:
            begin = next((i for i, byte in enumerate(end) if byte & 0xC0 != 0x80), len(end))
            lead = [pieces.byte_tokens.get(byte, -1) for byte in end[:begin]]
            ids = self._tokenizer.encode(end[begin:].decode(), add_special=False)
            tails.append([-1] if -1 in lead else [*lead, *ids])
        return tails


def _join(parts: Sequence[Sequence[int]], dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """The joined parts, and the offset of each part and of the end, int64 (parts + 1,)."""
    begins = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return np.array([value for part in parts for value in part] or [0], dtype), begins
