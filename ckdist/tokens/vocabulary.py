"""What a model's tokens stand for: enough to turn ids into text, without the code that turns text into ids.

It can be sent to another process as bytes: code that streams text needs no tokenizer, which is built from hostile
files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgpack

from ckdist.errors import EngineError
from ckdist.tokens.frames import packed
from ckdist.tokens.stream import StreamDecoder

MAX_VOCAB = 4 << 20  # tokens
MAX_PIECES_BYTES = 256 << 20


class Pieces(Sequence[bytes]):
    """The bytes of every token, end to end in one block: a list of a million `bytes` would take a hundred MB."""

    def __init__(self, block: bytes, lengths: Sequence[int]):
        self._block, self._ends = block, array("Q", accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    # Tokens are asked for one at a time: there are no slices.
    def __getitem__(self, token: int) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= token < len(self):
            raise IndexError(token)
        return self._block[self._ends[token] : self._ends[token + 1]]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """`pieces[i]` is token i in bytes; `special_ids` are the control tokens that `skip_special` leaves out.
    `strips_prefix_space` is true for SentencePiece vocabularies that put a space before a text: it is taken away again
    where the text's start is seen, after BOS.
    """

    pieces: Sequence[bytes] = field(repr=False)
    special_ids: frozenset[int]
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    strips_prefix_space: bool = False

    @property
    def vocab_size(self) -> int:
        """The number of ids the vocabulary reaches; a model's embedding may have more rows, which stand for no text."""
        return len(self.pieces)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD. Ids that do not start with BOS are the middle of a
        text: their leading space is kept.
        """
        decoder = self.decoder(skip_special)
        return "".join([decoder.step(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, skip_special: bool = True, kept: Iterable[int] = ()) -> StreamDecoder:
        """A decoder that is given one id at a time; its texts joined are `decode` of all ids.

        `kept`: control tokens that are not skipped.
        """
        return StreamDecoder(self, skip_special, kept)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for, special tokens included; empty beyond the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for people; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_bytes(self) -> bytes:
        """This part of a tokenizer, for another process."""
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
        """What `to_bytes` gave. EngineError for what cannot have come from there."""
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
