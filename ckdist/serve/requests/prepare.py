"""One entry for every kind of request.

It converts the bytes of a body to a `Prepared` for the engine, to texts that become vectors, or to a JSON answer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.records import EmbeddingWork, ModelFacts, Prepared
from ckdist.serve.requests import anthropic_request, responses
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.chat_request import adds_special, read_chat, read_reasoning, render
from ckdist.serve.requests.completion_request import (
    DEFAULT_MAX_TOKENS,
    encode_prompt,
    prompt_text,
    prompt_texts,
    read_logprobs,
    read_prompts,
)
from ckdist.serve.requests.embedding_request import embedding, llama_embedding, rerank, score
from ckdist.serve.requests.field_table import RULES, check_fields
from ckdist.serve.requests.infill import Gap, infill_tokens, read_gap
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.llama_request import read_llama_params, read_response_fields
from ckdist.serve.requests.params import read_params, with_prompts
from ckdist.serve.requests.prompt import tokenise_chat
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.tokenize_answer import detokenize, tokenize, tokenizer_facts
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
    fields = Fields(body)
    tools, work = read_chat(fields, tokenizer, facts)
    rendered = render(fields, tools, tokenizer, facts)
    tokens = tokenise_chat(tokenizer, rendered, adds_special(fields), facts)
    splits, budget = read_reasoning(fields)
    form = answer_form(tokenizer, rendered.text, tools, splits)
    sampling = work.sampling
    if (budget or 0) >= min(sampling.max_tokens, facts.context_length):
        budget = None
    grammar = answer_grammar(tokenizer, form, tools, sampling.grammar, budget)
    work = replace(work, sampling=replace(sampling, grammar=grammar), answer=form)
    return with_prompts(work, [tokens], facts, "messages")


def messages(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of Anthropic's /v1/messages for the engine."""
    request, skipped = anthropic_request.to_chat(body)
    return replace(chat(request, tokenizer, facts), skipped=skipped)


def count_tokens(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Returns the number of tokens in the prompt of a body of /v1/messages."""
    given, _ = anthropic_request.to_chat(body, needs_max_tokens=False)
    fields = Fields(given)
    tools, _ = read_chat(fields, tokenizer, facts)
    rendered = render(fields, tools, tokenizer, facts)
    return {"input_tokens": len(tokenise_chat(tokenizer, rendered, adds_special(fields), facts))}


def response(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/responses for the engine."""
    request, skipped = responses.to_chat(body)
    return replace(chat(request, tokenizer, facts), skipped=skipped, echoed=responses.echoed(body))


def completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/completions for the engine."""
    fields = Fields(body)
    given = read_prompts(fields, facts.vocab_size)
    echo, add_special = fields.switch("echo"), fields.switch("add_special_tokens", True)
    work = read_params(fields, tokenizer, facts, read_logprobs(fields), default_tokens=DEFAULT_MAX_TOKENS)
    suffix = fields.text("suffix")
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in given)):
        raise RequestError("suffix needs prompts that are text, and no echo", "suffix", "invalid_value")
    if suffix:
        facts.check_continues("infill")
        gaps = [Gap(prompt_text(prompt, [], tokenizer), suffix, "", ()) for prompt in given]
        prompts = [infill_tokens(gap, tokenizer, facts, "suffix") for gap in gaps]
    else:
        prompts = [encode_prompt(prompt, tokenizer, add_special, facts) for prompt in given]
    if echo:
        sampling = replace(work.sampling, prompt_logprobs=work.sampling.logprobs)
        work = replace(work, sampling=sampling, echo=True, texts=prompt_texts(given, prompts, tokenizer))
    return with_prompts(work, prompts, facts, "prompt")


def llama_completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of llama-server's /completion for the engine."""
    fields = Fields(body)
    given, wanted = read_prompts(fields, facts.vocab_size), read_response_fields(fields)
    work = read_llama_params(fields, tokenizer, facts)
    prompts = [encode_prompt(prompt, tokenizer, True, facts) for prompt in given]
    texts = prompt_texts(given, prompts, tokenizer)
    token_ids = work.token_ids or work.stream  # streamed pieces always have them
    work = replace(work, texts=texts, response_fields=wanted, token_ids=token_ids)
    return with_prompts(work, prompts, facts, "prompt")


def infill(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of llama-server's /infill for the engine."""
    facts.check_continues("infill")
    gap, others = read_gap(body)
    return llama_completion({**others, "prompt": infill_tokens(gap, tokenizer, facts)}, tokenizer, facts)


def apply_template(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Renders a chat for llama-server's /apply-template, as the text that the model would continue."""
    fields = Fields(body)
    tools, _ = read_chat(fields, tokenizer, facts)
    return {"prompt": render(fields, tools, tokenizer, facts).text}


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
