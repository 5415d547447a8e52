"""Reads bodies of /v1/embeddings, /embedding, /v1/rerank and /score: texts or token ids, with a vector each."""

from typing import Any

from ckdist.engine.messages import pack_tokens
from ckdist.errors import RequestError
from ckdist.serve.requests.engine_fields import read_cache_and_place
from ckdist.serve.requests.prompt import Prompt, encode_prompt, fitting, read_prompts
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.text_records import EmbeddingWork, ModelFacts
from ckdist.tokens.chat_input import kind_of
from ckdist.tokens.tokenizer import Tokenizer

MAX_INPUTS = 2048  # as OpenAI's
MAX_DIMENSIONS = 1 << 20
NO_NORM, EUCLIDEAN = -1, 2  # llama-server's embd_normalize


def embedding(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> EmbeddingWork:
    """Reads a body of /v1/embeddings."""
    fields = Fields(body)
    _check_embeds(facts)
    inputs = read_prompts(fields, ("input",), facts, dict)
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError(f"encoding_format ({form[:32]!r}) must be float or base64", "encoding_format")
    dimensions = fields.integer("dimensions", 0, 1, MAX_DIMENSIONS)
    return _work(fields, inputs, tokenizer, facts, "input", base64=form == "base64", dimensions=dimensions)


def llama_embedding(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> EmbeddingWork:
    """Reads a body of llama-server's /embedding."""
    fields = Fields(body)
    _check_embeds(facts)
    inputs = read_prompts(fields, ("content", "input", "prompt"), facts, dict)
    norm = fields.integer("embd_normalize", EUCLIDEAN, NO_NORM, 1 << 16)
    if norm not in (NO_NORM, EUCLIDEAN):
        text = f"({norm}) is not supported; {EUCLIDEAN} divides by the length, {NO_NORM} does nothing"
        raise wrong("embd_normalize", text, "unsupported_value")
    return _work(fields, inputs, tokenizer, facts, "content", normalise=norm == EUCLIDEAN)


def rerank(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> EmbeddingWork:
    """Reads a body of /v1/rerank: a query and documents."""
    fields = Fields(body)
    query = fields.text("query")
    if not query:
        raise wrong("query", "is needed: a string", "missing_required_parameter")
    texts = fields.value("texts", list)  # text-embeddings-inference, whose answer is a plain list
    name = "documents" if texts is None else "texts"
    documents = [_document(item, name) for item in fields.value(name, list) or ()]
    if not documents:
        raise wrong(name, "is needed: a list of strings", "missing_required_parameter")
    best = fields.integer("top_n", len(documents), 1, 1 << 31)
    returned = tuple(documents) if fields.switch(("return_documents", "return_text")) else ()
    more = {"best": best, "texts": returned, "plain": texts is not None}
    if facts.scores:
        pairs = [(query, document) for document in documents]
        return _pairs(fields, pairs, tokenizer, facts, name, **more)
    return _work(fields, (query, *documents), tokenizer, facts, name, queries=1, **more)


def score(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> EmbeddingWork:
    """Reads a body of vLLM's /score: pairs of `text_1` and `text_2`, or one `text_1` with every `text_2`."""
    fields = Fields(body)
    sides = [_side(fields, name) for name in ("text_1", "text_2")]
    first, second = map(len, sides)
    if first not in (1, second):
        raise wrong("text_1", f"has {first} texts and text_2 has {second}; give one, or as many")
    if facts.scores:
        pairs = list(zip(sides[0] * (second // first), sides[1], strict=True))
        return _pairs(fields, pairs, tokenizer, facts, "text_2")
    return _work(fields, (*sides[0], *sides[1]), tokenizer, facts, "text_2", queries=first)


def _check_embeds(facts: ModelFacts) -> None:
    if facts.scores:
        raise RequestError("the model is a cross-encoder, which has no embeddings; use /v1/rerank or /score", "model")


def _side(fields: Fields, name: str) -> list[str]:
    value = fields.value(name, str, list)
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise wrong(name, "is needed: a string or a list of strings", "missing_required_parameter")
    return [_document(item, name) for item in texts]


def _document(item: Any, name: str) -> str:
    """Returns a text, which may be the `text` of an object."""
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise wrong(name, f"must hold strings, not {kind_of(item)}", "invalid_type")
    return text


def _shared(fields: Fields, count: int, facts: ModelFacts, field: str) -> tuple[int, dict[str, Any]]:
    """Returns the most tokens of a text that is cut (0: it is refused), and the fields of every EmbeddingWork.

    Raises RequestError for more than MAX_INPUTS texts.
    """
    if count > MAX_INPUTS:
        raise RequestError(f"{field} has more than {MAX_INPUTS} texts; send them in several requests", field)
    limit = fields.integer("truncate_prompt_tokens", 0, -1, 1 << 31)
    cut = facts.context_length if limit == -1 else min(limit, facts.context_length)
    return cut, read_cache_and_place(fields)


def _pairs(
    fields: Fields, pairs: list[tuple[str, str]], tokenizer: Tokenizer, facts: ModelFacts, field: str, **more: Any
) -> EmbeddingWork:
    """Tokenizes pairs of texts. Raises RequestError for too many pairs, and for one that exceeds the context."""
    cut, shared = _shared(fields, len(pairs), facts, field)
    if facts.rank_template and cut:
        raise RequestError("truncate_prompt_tokens is not possible with this reranker; shorten the texts", field)
    sigmoid = fields.switch(("use_activation", "activation"), True) and facts.scores == "sigmoid"
    known: dict[str, list[int]] = {}  # ids by text: queries repeat
    prompts, first_texts = list[bytes](), list[int]()
    for texts in pairs:
        if facts.rank_template:
            tokens, first_text = _question(*texts, tokenizer, facts, field), 0
        else:
            for text in texts:
                known[text] = known.get(text) or tokenizer.encode(text, add_special=False)
            tokens, first_text = _pair(known[texts[0]], known[texts[1]], tokenizer, facts, field, cut)
        prompts.append(pack_tokens(tokens))
        first_texts.append(first_text)
    # scores are no vectors, whose length could be 1
    own = {"first_texts": tuple(first_texts), "sigmoid": sigmoid, "normalise": False}
    return EmbeddingWork(prompts, **own, **shared, **more)


def _question(query: str, document: str, tokenizer: Tokenizer, facts: ModelFacts, field: str) -> list[int]:
    """Returns the ids of a reranker's question. Control tokens in both texts are plain text."""
    before, _, rest = facts.rank_template.partition("{query}")
    between, _, after = rest.partition("{document}")
    first, second = len(before), len(before) + len(query) + len(between)
    literal = [(first, first + len(query)), (second, second + len(document))]
    text = before + query + between + document + after
    return fitting(tokenizer.encode(text, add_special=False, literal=literal), facts, field)


def _pair(
    first: list[int], second: list[int], tokenizer: Tokenizer, facts: ModelFacts, field: str, cut: int
) -> tuple[list[int], int]:
    """Returns the ids of a pair, and how many are the first text. `cut` (see `_tokens`) shortens the second text."""
    around = len(tokenizer.prefix) + len(tokenizer.middle) + len(tokenizer.suffix)
    if cut:
        second = second[: max(0, cut - around - len(first))]
    tokens, first_text = tokenizer.pair(first, second)
    return fitting(tokens, facts, field), first_text


def _work(
    fields: Fields, inputs: tuple[Prompt, ...], tokenizer: Tokenizer, facts: ModelFacts, field: str, **more: Any
) -> EmbeddingWork:
    """Tokenizes the inputs. Raises RequestError for too many inputs, and for one that exceeds the context."""
    cut, shared = _shared(fields, len(inputs), facts, field)
    add_special = fields.switch("add_special_tokens", True)
    prompts = [pack_tokens(_tokens(item, tokenizer, facts, field, cut, add_special)) for item in inputs]
    return EmbeddingWork(prompts, **shared, **more)


def _tokens(item: Prompt, tokenizer: Tokenizer, facts: ModelFacts, field: str, cut: int, special: bool) -> list[int]:
    """Returns the ids of one input.

    `cut`: maximum number of ids, with the special tokens around a text; a longer text is cut. 0: a longer text is
    refused.
    """
    if not isinstance(item, str):
        tokens = encode_prompt(item, tokenizer, False, facts, field)[: cut or None]
    elif cut:
        prefix, suffix = (tokenizer.prefix, tokenizer.suffix) if special else ((), ())
        text = tokenizer.encode(item, add_special=False)
        tokens = [*prefix, *text[: max(0, cut - len(prefix) - len(suffix))], *suffix]
    else:
        tokens = encode_prompt(item, tokenizer, special, facts, field)
    if not tokens:
        raise wrong(field, "has an empty text; give at least one token")
    return fitting(tokens, facts, field)
