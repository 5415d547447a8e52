"""Answers of /tokenize and /detokenize, which need no engine. llama-server and vLLM share both paths."""

from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.chat_request import rendered_chat
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20
MAX_CHARACTERS_IN_PIECES = 2 << 20  # an answer with pieces is 20 times as long as its text


def tokenize(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Tokenizes `content` (llama-server's), or `prompt` or `messages` (vLLM's).

    vLLM's answer also has the number of tokens.
    """
    fields = Fields(body)
    content, prompt = fields.text("content"), fields.text("prompt")
    with_pieces, with_texts = fields.switch("with_pieces"), fields.switch("return_token_strs")
    is_chat = fields.value("messages", list) is not None
    parse_special = fields.switch("parse_special", True)
    add_special = fields.switch(("add_special", "add_special_tokens"), prompt is not None)
    if content is None and prompt is None and not is_chat:
        text = "is needed: the text to tokenise; or prompt, or messages, as in vLLM"
        raise wrong("content", text, "missing_required_parameter")
    if is_chat:
        chat = Fields({name: body[name] for name in body if name not in TOKENIZE_NAMES})
        text, literal = rendered_chat(chat, tokenizer, facts)
    else:
        text, literal = content if content is not None else prompt or "", ()
    if (with_pieces or with_texts) and len(text) > MAX_CHARACTERS_IN_PIECES:
        raise RequestError(
            f"the text has {len(text)} characters, and with_pieces and return_token_strs take at most "
            f"{MAX_CHARACTERS_IN_PIECES}: send it in parts, or leave them out",
            "with_pieces" if with_pieces else "return_token_strs",
        )
    tokens = tokenizer.encode(text, add_special, parse_special, literal)
    answer: dict[str, Any] = {"tokens": tokens}
    if with_pieces:
        pieces = {token: {"id": token, "piece": _piece(tokenizer, token)} for token in set(tokens)}
        answer["tokens"] = [pieces[token] for token in tokens]
    if content is None:
        named = {token: tokenizer.token_text(token) for token in set(tokens)} if with_texts else {}
        texts = [named[token] for token in tokens] if with_texts else None
        answer |= {"count": len(tokens), "max_model_len": facts.context_length, "token_strs": texts}
    return answer


def detokenize(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Returns the text as `content`, llama-server's name, and as `prompt`, vLLM's."""
    fields = Fields(body)
    if fields.value("tokens", list) is None:
        raise wrong("tokens", "is needed: a list of token ids", "missing_required_parameter")
    text = tokenizer.decode(fields.token_ids("tokens", facts.vocab_size, MAX_TOKENS))
    return {"content": text, "prompt": text}


def tokenizer_facts(known: dict[str, Any], tokenizer: Tokenizer, _facts: ModelFacts) -> dict[str, Any]:
    """Returns `known` with the chat template and the texts of BOS and EOS.

    The names are those of /props and of vLLM's /tokenizer_info.
    """
    template, bos = tokenizer.chat_template, tokenizer.bos_token_id
    return {
        **known,
        "chat_template": template.sources["default"] if template is not None else "",
        "bos_token": "" if bos is None else tokenizer.token_text(bos),
        "eos_token": next((tokenizer.token_text(token) for token in sorted(tokenizer.eos_token_ids)), ""),
    }


TOKENIZE_NAMES = frozenset(["content", "prompt", "with_pieces", "return_token_strs", "parse_special", "add_special"])


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Returns a token's text, or its bytes if they are not whole characters, as llama-server does."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
