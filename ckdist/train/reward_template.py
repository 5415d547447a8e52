"""The text that a reward model reads, for servers: a question with one answer, as its training renders it."""

import contextlib
from pathlib import Path

from ckdist.errors import ConfigError, RequestError
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.turns import end_of_text
from ckdist.weights.stored_ranking import DOCUMENT, QUERY


def rerank_template(folder: Path, tokenizer: Tokenizer) -> str:
    """The chat template in `folder`, rendered with marks for question and answer, up to the answer's end token."""
    if not tokenizer.templates:
        end = end_of_text(tokenizer)
        return QUERY + DOCUMENT + ("" if end is None else tokenizer.token_text(end))
    chat = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": DOCUMENT}]
    with contextlib.closing(ChatProcess(folder)) as process:
        (written,) = process.write([(chat, [])])
    if isinstance(written, RequestError):
        raise ConfigError(f"the chat template of {folder} refuses a question with an answer: {written}")
    turn = written[-1]
    text = turn.prompt + turn.answer[: turn.learned[-1][1]]
    if not 0 <= text.find(QUERY) < text.find(DOCUMENT):
        raise ConfigError(f"the chat template of {folder} changes the words of a question or its answer")
    return text
