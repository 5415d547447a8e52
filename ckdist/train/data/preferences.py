"""Records of preferences, in the forms that TRL reads, as chats that end with the answers to compare.

chosen and rejected, with or without prompt; or prompt, completion and label. Each is a text or a list of messages.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from ckdist.errors import RequestError
from ckdist.tokens.chat_input import kind_of
from ckdist.train.data.record_forms import LABEL_KEYS, PAIR_KEYS
from ckdist.train.data.records import BadLine, Document, read_chat

KINDS = {"dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "labels"}  # method -> kind of its records
FORMS = {"pairs": "chosen and rejected", "labels": "prompt, completion and label"}
LABELS = {"true": 1, "1": 1, "false": 0, "0": 0}


def read_preference(document: Document | BadLine, kind: str) -> Document | BadLine:
    """A record as a preference of `kind`, pairs or labels: a chat per answer. Only the last messages are learned."""
    record, where = document.preference, document.where
    if record is None:
        return document if isinstance(document, BadLine) else BadLine(where, f"is no preference: give {FORMS[kind]}")
    try:
        chats, is_plain = _chats(record, kind)
        labels = (1, 0) if kind == "pairs" else (_label(record["label"]),)
        if is_plain:
            return Document(
                where, messages=chats[0], form=FORMS[kind], others=tuple(chats[1:]), labels=labels, is_plain=True
            )
        read = [read_chat(record, chat, where, FORMS[kind]) for chat in chats]
    except RequestError as error:
        return BadLine(where, f"has a preference that cannot be learned: {error}")
    messages, *others = [one.messages or [] for one in read]
    return Document(
        where, messages=messages, tools=read[0].tools, form=FORMS[kind], others=tuple(others), labels=labels
    )


def write_answers(
    documents: Sequence[Document], write: Callable[[Sequence[Any]], list[Any]], plain: Callable[[Document, Any], Any]
) -> list[Any]:
    """The turns to learn of each document, one per answer, or the first error.

    Args:
        write: Renders chats with the template.
        plain: The turn of a document's chat as plain text.
    """
    chats = [[document.messages, *document.others] for document in documents]
    rendered = iter(
        write(
            [(chat, doc.tools) for doc, own in zip(documents, chats, strict=True) if not doc.is_plain for chat in own]
        )
    )
    written = []
    for document, own in zip(documents, chats, strict=True):
        turns = [plain(document, chat) for chat in own] if document.is_plain else list(islice(rendered, len(own)))
        error = next((turn for turn in turns if isinstance(turn, RequestError)), None)
        written.append(error or [turn[-1] for turn in turns])
    return written


def _label(label: Any) -> int:
    text = str(label).lower()
    if text not in LABELS:
        raise RequestError(f"label ({label!r:.20}) must be true or false")
    return LABELS[text]


def _chats(record: dict[str, Any], kind: str) -> tuple[list[list[Any]], bool]:
    """The chat of each answer, and whether all is plain text. Raises RequestError if the record is not of `kind`."""
    needed = PAIR_KEYS if kind == "pairs" else LABEL_KEYS
    missing = [key for key in needed if record.get(key) is None]
    if missing:
        raise RequestError(f"it has no {' and no '.join(missing)}; give {FORMS[kind]}")
    given = {key: record[key] for key in (PAIR_KEYS if kind == "pairs" else ("completion",))}
    are_texts, prompt = all(isinstance(value, str) for value in given.values()), record.get("prompt")
    if are_texts and prompt is None:
        chats = _divided(*given.values())
    elif are_texts and isinstance(prompt, str):
        chats = [_pair(prompt, value) for value in given.values()]
    else:
        history = _messages(prompt, "prompt") if isinstance(prompt, list) else []
        chats = [[*history, *_messages(value, key)] for key, value in given.items()]
        if isinstance(prompt, str) and not all(_asks(chat, prompt) for chat in chats):
            raise RequestError("prompt is a text that is not among the messages of the answers; write it as messages")
    if chats[0][:-1] != chats[-1][:-1]:
        raise RequestError("chosen and rejected differ before their last messages: only one answer can be compared")
    if kind == "pairs" and chats[0][-1] == chats[1][-1]:
        raise RequestError("chosen and rejected are the same answer")
    return chats, are_texts and prompt is None


def _asks(chat: Sequence[Any], prompt: str) -> bool:
    """True if a chat has the prompt among its messages, as UltraFeedback's."""
    return any(isinstance(message, dict) and message.get("content") == prompt for message in chat[:-1])


def _messages(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{name} must be a list of messages, not {kind_of(value) if value else 'empty'}")
    return value


def _divided(chosen: str, rejected: str) -> list[list[Any]]:
    """Two texts without a prompt: it is their common beginning, up to its last space, which begins the answers."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = next((at for at, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    while common and not (chosen[common : common + 1].isspace() and rejected[common : common + 1].isspace()):
        common -= 1
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text[common:].strip():
            raise RequestError(f"{name} has no answer after the text that both begin with")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"{name} is not Unicode (half of a surrogate pair)")
    return [_pair(chosen[:common], chosen[common:]), _pair(rejected[:common], rejected[common:])]


def _pair(prompt: str, answer: str) -> list[Any]:
    if any(text.lstrip().startswith('[{"') for text in (prompt, answer)):
        raise RequestError("a text is the JSON of messages: write the file as .jsonl or .parquet")
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
