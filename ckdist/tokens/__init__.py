"""Converts text to token ids and back, and chats to text.

The `tokenizers` library does the work on vocabularies. Nothing here depends on the model.
"""

from ckdist.tokens.chat import ChatTemplate
from ckdist.tokens.folder import load_tokenizer
from ckdist.tokens.stream import StreamDecoder
from ckdist.tokens.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "load_tokenizer"]
