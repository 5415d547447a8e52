"""The limits of a text worker's answer, and the answer to a request whose work exceeds the worker's limits."""

from ckdist.serve.problems import Problem

MAX_ANSWER = 64 << 20  # bytes

FIELDS = {
    "chat": "messages",
    "messages": "messages",
    "count_tokens": "messages",
    "response": "input",
    "response_continued": "input",
    "response_links": "input",
    "completion": "prompt",
    "infill": "input_prefix",
    "embedding": "input",
    "llama_embedding": "content",
    "rerank": "documents",
    "score": "text_2",
    "tokenize": "content",
    "detokenize": "tokens",
}  # kind of request -> field with its text


def too_much(kind: str) -> Problem:
    """Returns the answer if a worker exceeded its limits."""
    field = FIELDS.get(kind)
    return Problem(
        400,
        f"rendering and tokenising {field or 'the text'} takes too much time or memory; "
        "send less text, or a simpler grammar or schema",
        field,
    )
