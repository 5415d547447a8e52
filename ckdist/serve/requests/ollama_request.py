"""Converts bodies of Ollama's /api/chat and /api/generate to those of chats and completions."""

import json
from dataclasses import replace
from typing import Any

from msgspec import structs

from ckdist.errors import RequestError
from ckdist.serve.requests.chat_request import chat
from ckdist.serve.requests.completion_request import completion
from ckdist.serve.requests.embedding_request import embedding
from ckdist.serve.requests.field_table import check_fields
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.text_records import EmbeddingWork, ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer

# Ollama's defaults of `options`. The server's own flags have precedence.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "repeat_last_n": 64}
# Fields of OpenAI's paths for contents that an answer of Ollama's has no place for. /v1/responses refuses them, too.
OTHERS = (
    *("n", "n_cmpl", "best_of", "echo", "timings_per_token"),
    *("return_token_ids", "return_tokens", "return_tokens_as_token_ids"),
)
READ = ("options", "messages", "tools", "prompt", "system", "suffix", "raw", "stream", "shift", "truncate")
REFUSED = {
    "images": "images are not read: this server reads text",
    "template": "the template is the model's; start the server with --chat-template-file",
    "context": "send the conversation to /api/chat; its beginning is found in the cache",
    "width": "images are not made", "height": "images are not made", "steps": "images are not made",
}  # fmt: skip


def ollama_chat(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /api/chat for the engine."""
    fields = Fields(body)
    messages = [_message(item, index) for index, item in enumerate(fields.value("messages", list) or ())]
    _match_calls(messages)
    more = {name: body[name] for name in ("tools",) if body.get(name)}
    return _prepared("chat", {**_shared(fields), "messages": messages, **more}, tokenizer, facts)


def ollama_generate(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /api/generate for the engine: a chat of one message, or the prompt itself if it is `raw`."""
    fields = Fields(body)
    prompt, system, suffix = fields.text("prompt", ""), fields.text("system"), fields.text("suffix")
    if suffix or fields.switch("raw"):
        if system:
            raise RequestError("system has no place in a raw prompt or with suffix; leave it out", "system")
        completed = {**_shared(fields), "prompt": prompt, **({"suffix": suffix} if suffix else {})}
        completed.setdefault("num_predict", -1)
        completed.pop("think", None)
        return _prepared("completion", completed, tokenizer, facts)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return _prepared("chat", {**_shared(fields), "messages": messages}, tokenizer, facts)


def _prepared(face: str, body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    sampling = {**DEFAULTS, **facts.defaults.sampling}
    facts = structs.replace(facts, defaults=replace(facts.defaults, sampling=sampling))
    check_fields("response", {name: body[name] for name in OTHERS if name in body}, strict=False)
    ignored = check_fields(face, body, facts.strict_fields)
    work = (chat if face == "chat" else completion)(body, tokenizer, facts)
    return structs.replace(work, ignored=ignored)


def _shared(fields: Fields) -> dict[str, Any]:
    """Returns the fields that both kinds of request share. Those of `options` are fields of their own."""
    for name, remedy in REFUSED.items():
        if fields.body.get(name):
            raise RequestError(f"{name} is not supported; {remedy}", name, "unsupported_parameter")
    options = fields.value("options", dict) or {}
    top = {name: value for name, value in fields.body.items() if name not in (*READ, *REFUSED)}
    if both := options.keys() & top.keys():
        name = min(both)
        raise RequestError(f"options.{name[:64]} and {name[:64]} say the same; give one", name[:64], "invalid_value")
    logprobs: dict[str, Any] = {}
    if top.pop("logprobs", None):
        logprobs = {"logprobs": True, "top_logprobs": top.pop("top_logprobs", 0)}
    return {**options, **top, **logprobs, "stream": fields.switch("stream", True)}


def _message(message: Any, index: int) -> dict[str, Any]:
    """Converts a message. Its arguments of calls become JSON, and its thinking gets OpenAI's name."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object", "messages", "invalid_type")
    if message.get("images"):
        raise RequestError(f"{where}.images is not supported; {REFUSED['images']}", "messages", "unsupported_value")
    kept = {name: value for name, value in message.items() if name in ("role", "content", "name")}
    kept["content"] = kept.get("content") or ""
    if isinstance(message.get("thinking"), str):
        kept["reasoning_content"] = message["thinking"]
    if isinstance(message.get("tool_name"), str):
        kept["name"] = message["tool_name"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        kept["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return kept


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object", "messages", "invalid_type")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": function.get("name"), "arguments": text}}


def _match_calls(messages: list[dict[str, Any]]) -> None:
    """Gives calls and results ids, which Ollama's messages may lack. Results follow their calls in order."""
    waiting: list[str] = []
    for number, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = call["id"] if isinstance(call["id"], str) else f"call{number:02d}{place:02d}x"[:9]
            waiting.append(call["id"])
        if message.get("role") == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)


def ollama_embed(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> EmbeddingWork:
    """Prepares a body of /api/embed, or of the older /api/embeddings with one `prompt`."""
    fields = Fields(body)
    one = fields.text("prompt")
    own = {"input": one} if one is not None else {name: body[name] for name in ("input", "dimensions") if name in body}
    more = {name: value for name, value in body.items() if name not in ("input", "prompt", "options", "truncate")}
    cut = {"truncate_prompt_tokens": -1} if fields.switch("truncate", True) else {}
    converted = {**(fields.value("options", dict) or {}), **more, **own, **cut}
    ignored = check_fields("embedding", converted, facts.strict_fields)
    return structs.replace(embedding(converted, tokenizer, facts), ignored=ignored)
