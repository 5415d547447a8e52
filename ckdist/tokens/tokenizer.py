"""One model's tokenizer: text to ids with its BOS and EOS rules, ids to text, and what each token is in bytes.

Where it comes from is not its business: `folder` and `gguf` build it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tokenizers

from ckdist.errors import RequestError
from ckdist.tokens.chat import ChatTemplate
from ckdist.tokens.stream import StreamDecoder


@dataclass(frozen=True)
class Tokenizer:
    """Made by `load_tokenizer` or `tokenizer_from_gguf`.

    `pieces[i]` is token i in bytes; `special_ids` are the control tokens that `skip_special` leaves out.
    `prefix` and `suffix` are the ids that `add_special` puts around a text. `strips_prefix_space` is true for SentencePiece
    vocabularies that put a space before a text: it is taken away again where the text's start is seen, after BOS.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    pieces: Sequence[bytes] = field(repr=False)
    special_ids: frozenset[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    strips_prefix_space: bool = False
    chat_template: ChatTemplate | None = field(default=None, repr=False)

    @property
    def vocab_size(self) -> int:
        """The number of ids the vocabulary reaches; a model's embedding may have more rows, which stand for no text."""
        return len(self.pieces)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`; with `add_special` the model's own BOS and EOS rules apply.

        With `parse_special` control tokens that stand in the text as text become those tokens, as in transformers and llama-server:
        that is how a rendered chat template becomes control tokens. Without it they are plain text, which nobody can use to end
        a turn; tokens that are user-defined and not control are found either way. A BOS that the text begins with already is not
        doubled. Raises RequestError for text that is not Unicode (lone surrogates).
        """
        backend = self.backend if parse_special else self._plain
        try:
            ids = backend.encode_batch([text], add_special_tokens=False)[0].ids  # a batch, since only that releases the GIL
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the text is not valid Unicode: it has bytes or escapes that are no characters") from None
        if not add_special:
            return ids
        prefix = () if self.prefix and self.prefix == tuple(ids[: len(self.prefix)]) else self.prefix
        return [*prefix, *ids, *self.suffix]

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """`backend`, sharing its vocabulary, as one that takes control tokens in a text for plain text."""
        plain = tokenizers.Tokenizer(self.backend.model)
        if self.backend.normalizer is not None:
            plain.normalizer = self.backend.normalizer
        if self.backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self.backend.pre_tokenizer
        added = self.backend.get_added_tokens_decoder()
        plain.add_tokens([added[token_id] for token_id in sorted(added)])
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD. Ids that do not start with BOS are the middle of a text:
        their leading space is kept."""
        decoder = self.decoder(skip_special)
        return "".join([decoder.step(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder that is given one id at a time; its texts joined are `decode` of all ids."""
        return StreamDecoder(self, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for, special tokens included; empty beyond the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for people; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")
