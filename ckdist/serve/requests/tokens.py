"""/tokenize and /detokenize, whose answers need no engine."""

from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.serve.requests.prepared import ModelFacts
from ckdist.tokens.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20


def tokenize(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    fields = Fields(body)
    fields.refuse_unknown(("content", "add_special", "parse_special", "with_pieces"), {})
    content = fields.text("content")
    if content is None:
        raise RequestError("content is needed: the text to tokenise", "content")
    fields.switch("parse_special")
    tokens = tokenizer.encode(content, add_special=fields.switch("add_special"))
    if fields.switch("with_pieces"):
        return {"tokens": [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]}
    return {"tokens": tokens}


def detokenize(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    fields = Fields(body)
    fields.refuse_unknown(("tokens",), {})
    if fields.value("tokens", list) is None:
        raise RequestError("tokens is needed: a list of token ids", "tokens")
    return {"content": tokenizer.decode(fields.token_ids("tokens", facts.vocab_size, MAX_TOKENS))}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are no whole characters; as llama-server does."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
