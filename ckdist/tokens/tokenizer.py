"""One model's tokenizer: text to ids with its BOS and EOS rules, ids to text, and what each token is in bytes.

Where it comes from is not its business: `folder` and `gguf` build it.
"""

from dataclasses import dataclass, field
from functools import cached_property

import tokenizers

from ckdist.errors import RequestError
from ckdist.tokens.chat import ChatTemplate
from ckdist.tokens.density import most_bytes_per_token
from ckdist.tokens.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Vocabulary):
    """Made by `load_tokenizer` or `tokenizer_from_gguf`.

    `prefix` and `suffix` are the ids that `add_special` puts around a text; `middle` those between two.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    chat_template: ChatTemplate | None = field(default=None, repr=False)

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """No text has fewer tokens than its bytes divided by this; None where that cannot be said."""
        return most_bytes_per_token(self.backend, self.pieces)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`; with `add_special` the model's own BOS and EOS rules apply.

        With `parse_special` control tokens that stand in the text as text become those tokens, as in transformers and
        llama-server: that is how a rendered chat template becomes control tokens. Without it they are plain text, which
        nobody can use to end a turn; tokens that are user-defined and not control are found either way. A BOS that the
        text begins with already is not doubled. Raises RequestError for text that is not Unicode (lone surrogates).
        """
        backend = self.backend if parse_special else self._plain
        try:
            # A batch, since only that releases the GIL; `fast` keeps no offsets.
            ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                "the text is not valid Unicode: it has bytes or escapes that are no characters"
            ) from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is a BaseException
            raise RequestError(f"the tokenizer fails on this text: {' '.join(str(error).split())[:200]}") from None
        if not add_special:
            return ids
        prefix = () if self.prefix and self.prefix == tuple(ids[: len(self.prefix)]) else self.prefix
        return [*prefix, *ids, *self.suffix]

    def pair(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """The ids of two texts that are read together, by the ids of each; and of how many the first is."""
        begin = [*self.prefix, *first, *self.middle]
        return [*begin, *second, *self.suffix], len(begin)

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
