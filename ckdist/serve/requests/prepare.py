"""One entry for every kind of request.

It converts the bytes of a body to a `Prepared` for the engine, to texts that become vectors, or to a JSON answer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckdist.serve.requests import anthropic_request, responses
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.chat_request import ChatRequest, parse_chat
from ckdist.serve.requests.completion_request import encode_prompt, parse_completion, prompt_text
from ckdist.serve.requests.embedding_request import EmbeddingWork, embedding, llama_embedding, rerank, score
from ckdist.serve.requests.field_table import RULES, check_fields
from ckdist.serve.requests.infill import Gap, infill_tokens, read_gap
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.llama_request import parse_llama_completion
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.serve.requests.prompt import render_chat, tokenise_chat
from ckdist.serve.requests.tokenize_answer import detokenize, tokenize, tokenizer_facts
from ckdist.tokens.control_text import RenderedChat
from ckdist.tokens.tokenizer import Tokenizer


def prepare(
    kind: str, body: bytes, tokenizer: Tokenizer, facts: ModelFacts
) -> Prepared | EmbeddingWork | dict[str, Any]:
    """Prepares a request of this kind (a key of `KINDS`). Raises RequestError or Problem for invalid requests."""
    fields = parse_object(body)
    ignored = check_fields(kind, fields, facts.strict_fields) if kind in RULES else ()
    result = KINDS[kind](fields, tokenizer, facts)
    return result if isinstance(result, dict) else replace(result, ignored=ignored)


def chat(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/chat/completions for the engine."""
    request = parse_chat(body, tokenizer, facts)
    rendered = _rendered(request, tokenizer, facts)
    tokens = tokenise_chat(tokenizer, rendered, request.add_special_tokens, facts)
    form = answer_form(tokenizer, rendered.text, request.tools, request.split_reasoning)
    sampling = request.params.sampling
    most = min(request.params.max_tokens or facts.context_length, facts.context_length)
    budget = request.thinking_budget if (request.thinking_budget or 0) < most else None
    grammar = answer_grammar(tokenizer, form, request.tools, sampling.grammar, budget)
    params = replace(request.params, sampling=replace(sampling, grammar=grammar))
    return params.prepared([tokens], facts, "messages", answer=form)


def messages(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of Anthropic's /v1/messages for the engine."""
    request, skipped = anthropic_request.to_chat(body)
    return replace(chat(request, tokenizer, facts), skipped=skipped)


def count_tokens(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Returns the number of tokens in the prompt of a body of /v1/messages."""
    given, _ = anthropic_request.to_chat(body, needs_max_tokens=False)
    request = parse_chat(given, tokenizer, facts)
    rendered = _rendered(request, tokenizer, facts)
    return {"input_tokens": len(tokenise_chat(tokenizer, rendered, request.add_special_tokens, facts))}


def response(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/responses for the engine."""
    request, skipped = responses.to_chat(body)
    return replace(chat(request, tokenizer, facts), skipped=skipped, echoed=responses.echoed(body))


def completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/completions for the engine."""
    request = parse_completion(body, tokenizer, facts)
    if request.suffix:
        facts.check_continues("infill")
        gaps = [Gap(prompt_text(prompt, [], tokenizer), request.suffix, "", ()) for prompt in request.prompts]
        prompts = [infill_tokens(gap, tokenizer, facts, "suffix") for gap in gaps]
    else:
        prompts = [encode_prompt(prompt, tokenizer, request.add_special, facts) for prompt in request.prompts]
    pairs = zip(request.prompts, prompts, strict=True)
    texts = tuple(prompt_text(prompt, tokens, tokenizer) for prompt, tokens in pairs) if request.echo else ()
    return request.params.prepared(prompts, facts, "prompt", echo=request.echo, texts=texts)


def llama_completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of llama-server's /completion for the engine."""
    request = parse_llama_completion(body, tokenizer, facts)
    prompts = [encode_prompt(prompt, tokenizer, True, facts) for prompt in request.prompts]
    texts = tuple(
        prompt_text(prompt, tokens, tokenizer) for prompt, tokens in zip(request.prompts, prompts, strict=True)
    )
    prepared = request.params.prepared(prompts, facts, "prompt", texts=texts, response_fields=request.response_fields)
    return replace(prepared, token_ids=prepared.token_ids or prepared.stream)  # streamed pieces always have them


def infill(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of llama-server's /infill for the engine."""
    facts.check_continues("infill")
    gap, others = read_gap(body)
    return llama_completion({**others, "prompt": infill_tokens(gap, tokenizer, facts)}, tokenizer, facts)


def apply_template(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Renders a chat for llama-server's /apply-template, as the text that the model would continue."""
    return {"prompt": _rendered(parse_chat(body, tokenizer, facts), tokenizer, facts).text}


def _rendered(request: ChatRequest, tokenizer: Tokenizer, facts: ModelFacts) -> RenderedChat:
    options = request.add_generation_prompt, request.template_kwargs, request.tools.given
    return render_chat(tokenizer, request.messages, *options, facts)


KINDS: dict[str, Callable[[dict[str, Any], Tokenizer, ModelFacts], Prepared | EmbeddingWork | dict[str, Any]]] = {
    "chat": chat,
    "messages": messages,
    "count_tokens": count_tokens,
    "response": response,
    "completion": completion,
    "llama_completion": llama_completion,
    "infill": infill,
    "embedding": embedding,
    "llama_embedding": llama_embedding,
    "rerank": rerank,
    "score": score,
    "apply_template": apply_template,
    "tokenize": tokenize,
    "detokenize": detokenize,
    "tokenizer_facts": tokenizer_facts,
}
