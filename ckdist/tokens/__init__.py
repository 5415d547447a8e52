"""Converts text to token ids and back, and chats to text.

The `tokenizers` library does the work on vocabularies. Nothing here depends on the model.
"""

from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.stream import StreamDecoder
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_folder import load_tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "load_tokenizer"]
