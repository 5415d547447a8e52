"""Text to token ids and back, and chats to text.

The vocabulary work is the `tokenizers` library's; nothing here knows the model.
"""

from ckdist.tokens.chat import ChatTemplate
from ckdist.tokens.folder import load_tokenizer
from ckdist.tokens.stream import StreamDecoder
from ckdist.tokens.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "load_tokenizer"]
