"""The bytes of a model's tokens: enough to turn ids into text, without the code that turns text into ids.

They can be sent to another process. So code that streams text needs no tokenizer, which is built from hostile files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgpack

from ckdist.errors import EngineError
from ckdist.tokens.stream import StreamDecoder
from ckdist.tokens.worker_frames import packed

MAX_VOCAB = 4 << 20  # tokens
MAX_PIECES_BYTES = 256 << 20


class Pieces(Sequence[bytes]):
    """The bytes of every token, end to end in one block: a list of a million `bytes` would take a hundred MB."""

    def __init__(self, block: bytes, lengths: Sequence[int]):
        self._block, self._ends = block, array("Q", accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    # Callers read one token at a time, so there are no slices.
    def __getitem__(self, token: int) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= token < len(self):
            raise IndexError(token)
        return self._block[self._ends[token] : self._ends[token + 1]]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of one model."""

    pieces: Sequence[bytes] = field(repr=False)  # [i]: the bytes of token i
    special_ids: frozenset[int]  # control tokens, which `skip_special` leaves out
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    # SentencePiece puts a space before a text. It is removed if the start of the text is decoded, after BOS.
    strips_prefix_space: bool = False

    @property
    def vocab_size(self) -> int:
        """The number of ids. A model's embedding may have more rows, which have no text."""
        return len(self.pieces)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD.

        Ids that do not start with BOS are the middle of a text, so their leading space is kept.
        """
        decoder = self.decoder(skip_special)
        return "".join([decoder.step(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder of one id at a time. Its joined texts equal `decode` of all ids."""
        return StreamDecoder(self, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of `token_id`, special tokens included; empty beyond the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for people. A part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_bytes(self) -> bytes:
        """Encodes the vocabulary for another process."""
        return packed(
            {
                "block": b"".join(self.pieces),
                "lengths": array("I", map(len, self.pieces)).tobytes(),
                "special": array("I", self.special_ids).tobytes(),
                "bos": self.bos_token_id,
                "eos": sorted(self.eos_token_ids),
                "strips": self.strips_prefix_space,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """Decodes the result of `to_bytes`. Raises EngineError if it cannot come from there."""
        try:
            fields = msgpack.unpackb(data, max_bin_len=MAX_PIECES_BYTES)
            lengths, special = array("I"), array("I")
            lengths.frombytes(fields["lengths"])
            special.frombytes(fields["special"])
            if not 0 < len(lengths) <= MAX_VOCAB or sum(lengths) != len(fields["block"]):
                raise ValueError(f"{len(lengths)} tokens of {len(fields['block'])} bytes")
            return cls(
                pieces=Pieces(fields["block"], lengths),
                special_ids=frozenset(special),
                bos_token_id=fields["bos"],
                eos_token_ids=frozenset(fields["eos"]),
                strips_prefix_space=fields["strips"] is True,
            )
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise EngineError(f"the vocabulary that the tokenizer's process sent is malformed: {error}") from None
