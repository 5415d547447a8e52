"""One model's tokenizer: text to ids with its BOS and EOS rules, ids to text, and the bytes of each token.

`folder` and `gguf` build it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from ckdist.errors import RequestError, one_line
from ckdist.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:  # rank 0 neither writes chats nor tokenises the text of strangers
    from ckdist.tokens.chat_template import ChatTemplate
    from ckdist.tokens.control_text import ControlText
    from ckdist.tokens.literal_text import LiteralText


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Vocabulary):
    """A vocabulary with its tokenizer. Made by `load_tokenizer` or `tokenizer_from_gguf`."""

    backend: tokenizers.Tokenizer = field(repr=False)
    prefix: tuple[int, ...] = ()  # ids that `add_special` puts before a text
    suffix: tuple[int, ...] = ()  # ids that it puts after a text
    middle: tuple[int, ...] = ()  # ids between two texts
    templates: Mapping[str, str] = field(default_factory=dict, repr=False)  # chat templates by name
    special_texts: Mapping[str, str] = field(default_factory=dict, repr=False)  # texts that templates call bos_token …

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The model's chat template, or None. Raises ModelFileError if it is too long."""
        from ckdist.tokens.chat_template import ChatTemplate

        return ChatTemplate(self.templates, self.special_texts) if self.templates else None

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """Tokens of a text >= its bytes / this. None if there is no such bound."""
        from ckdist.tokens.density import most_bytes_per_token

        return most_bytes_per_token(self.backend, self.pieces)

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = True,
        literal: Collection[tuple[int, int]] = (),
    ) -> list[int]:
        """The ids of `text`.

        Args:
            add_special: Apply the model's own BOS and EOS rules. A BOS that begins the text already is not doubled.
            parse_special: Control tokens written in the text become tokens, as in transformers and llama-server. A
                rendered chat template needs this. Otherwise they are plain text, so that nobody can end a turn with
                them. Tokens that are user-defined and not control are found in both cases.
            literal: Spans of the text in which control tokens are plain text (see `RenderedChat`).

        Raises:
            RequestError: The text is not Unicode (lone surrogates).
        """
        try:
            if literal or not parse_special:
                ids = self._literal.encode(text, literal if parse_special else None)
            else:
                # A batch, since only that releases the GIL; `fast` keeps no offsets.
                ids = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except RequestError:
            raise
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                "the text is not valid Unicode: it has bytes or escapes that are no characters"
            ) from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is a BaseException
            raise RequestError(f"the tokenizer fails on this text: {one_line(error)}") from None
        if not add_special:
            return ids
        prefix = () if self.prefix and self.prefix == tuple(ids[: len(self.prefix)]) else self.prefix
        return [*prefix, *ids, *self.suffix]

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, object]],
        special_in_text: bool = False,
        renderer: "ChatTemplate | None" = None,
        **options: Any,
    ) -> list[int]:
        """The ids of a chat as the model's template writes it. The text of messages makes no control tokens.

        Args:
            special_in_text: The text of messages does make control tokens.
            renderer: Renders in place of `chat_template`.
            options: Options of `ChatTemplate.prompt`.

        Raises:
            RequestError: The model has no template, or the template refuses the messages.
        """
        template = renderer or self.chat_template
        if template is None:
            raise RequestError("the model has no chat template")
        chat = template.prompt(None if special_in_text else self.control_text, messages, **options)
        return self.encode(chat.text, add_special=False, literal=chat.literal)

    def pair(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """The ids of two texts that are read together, from the ids of each, and the length of the first part."""
        begin = [*self.prefix, *first, *self.middle]
        return [*begin, *second, *self.suffix], len(begin)

    @cached_property
    def control_text(self) -> "ControlText":
        """The texts of the control tokens."""
        from ckdist.tokens.control_text import ControlText

        added = self.backend.get_added_tokens_decoder().values()
        return ControlText(token.content for token in added if token.special)

    @cached_property
    def _literal(self) -> "LiteralText":
        from ckdist.tokens.literal_text import LiteralText

        return LiteralText(self.backend)
