"""One entry for every kind of request.

It converts the bytes of a body to a `Prepared` for the engine, to texts that become vectors, or to a JSON answer.
"""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from ckdist.errors import RequestError
from ckdist.serve.requests import anthropic_request, responses
from ckdist.serve.requests.adapter_choice import read_adapters
from ckdist.serve.requests.chat_request import apply_template, chat, rendered_chat
from ckdist.serve.requests.completion_request import completion
from ckdist.serve.requests.embedding_request import embedding, llama_embedding, rerank, score
from ckdist.serve.requests.field_table import RULES, check_fields
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.kept_items import named_items, response_links
from ckdist.serve.requests.llama_request import infill, llama_completion
from ckdist.serve.requests.ollama_request import ollama_chat, ollama_embed, ollama_generate
from ckdist.serve.requests.prefill_request import face_of, prefill
from ckdist.serve.requests.prompt import tokenise_chat
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.tokenize_answer import detokenize, tokenize, tokenizer_facts
from ckdist.serve.text_records import EmbeddingWork, ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer


def prepare(
    kind: str, body: bytes, tokenizer: Tokenizer, facts: ModelFacts
) -> Prepared | EmbeddingWork | dict[str, Any]:
    """Prepares a request of this kind (a key of `KINDS`). Raises RequestError or Problem for invalid requests."""
    fields = parse_object(body)
    face = face_of(fields) if kind == "prefill" else kind
    ignored = check_fields(face, fields, facts.strict_fields) if face in RULES else ()
    adapters = read_adapters(Fields(fields["body"] if kind == "response_continued" else fields), facts)
    result = KINDS[kind](fields, tokenizer, facts)
    if isinstance(result, dict):
        return result
    result = structs.replace(result, ignored=(*result.ignored, *ignored))
    if isinstance(result, Prepared):
        return structs.replace(result, adapters=facts.adapters_of_all if adapters is None else adapters)
    if adapters:
        raise RequestError(f"adapter {adapters[0][0]!r} makes no vectors; name the model {facts.name!r}", "model")
    return result


def messages(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of Anthropic's /v1/messages for the engine."""
    request, skipped = anthropic_request.to_chat(body)
    return structs.replace(chat(request, tokenizer, facts), skipped=skipped)


def count_tokens(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Returns the number of tokens in the prompt of a body of /v1/messages."""
    given, _ = anthropic_request.to_chat(body, needs_max_tokens=False)
    fields = Fields(given)
    rendered = rendered_chat(fields, tokenizer, facts)
    return {"input_tokens": len(tokenise_chat(tokenizer, rendered, fields.switch("add_special_tokens"), facts))}


def response(
    body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts, history: list[Any] | None = None
) -> Prepared:
    """Prepares a body of /v1/responses for the engine. `history`: the kept items that it continues."""
    request, skipped = responses.to_chat(body, history)
    echoed = {**responses.echoed(body), "store": Fields(body).switch("store", True)}
    items = named_items(body["input"]) if echoed["store"] or history is not None else []
    return structs.replace(chat(request, tokenizer, facts), skipped=skipped, echoed=echoed, items=items)


def response_continued(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a `body` of /v1/responses that continues the kept items in `history`."""
    fields = Fields(body)
    history, own = fields.value("history", list), fields.value("body", dict)
    if history is None or own is None:
        raise RequestError("the body must be one JSON object")
    ignored = check_fields("response", own, facts.strict_fields)
    return structs.replace(response(own, tokenizer, facts, history), ignored=ignored)


KINDS: dict[str, Callable[[dict[str, Any], Tokenizer, ModelFacts], Prepared | EmbeddingWork | dict[str, Any]]] = {
    "chat": chat,
    "messages": messages,
    "count_tokens": count_tokens,
    "response": response,
    "response_continued": response_continued,
    "response_links": response_links,
    "completion": completion,
    "llama_completion": llama_completion,
    "infill": infill,
    "prefill": prefill,
    "ollama_chat": ollama_chat,
    "ollama_generate": ollama_generate,
    "ollama_embed": ollama_embed,
    "embedding": embedding,
    "llama_embedding": llama_embedding,
    "rerank": rerank,
    "score": score,
    "apply_template": apply_template,
    "tokenize": tokenize,
    "detokenize": detokenize,
    "tokenizer_facts": tokenizer_facts,
}
