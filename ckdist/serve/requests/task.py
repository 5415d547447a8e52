"""What a text worker does with one request: `prepare`, and whatever comes of it as a map and a body that can be sent
back.

Only what is raised on purpose is told to the client; a panic of the tokenizers library and memory that ran out are the
text's fault.
"""

from typing import Any

from ckdist.errors import CkdistError, RequestError
from ckdist.serve.encoding import to_json
from ckdist.serve.problems import Problem
from ckdist.serve.requests.embedding import EmbeddingWork
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer

MAX_ANSWER = 64 << 20  # bytes

FIELDS = {
    "chat": "messages",
    "messages": "messages",
    "count_tokens": "messages",
    "response": "input",
    "completion": "prompt",
    "infill": "input_prefix",
    "embedding": "input",
    "llama_embedding": "content",
    "rerank": "documents",
    "score": "text_2",
    "tokenize": "content",
    "detokenize": "tokens",
}  # where a kind of request has its text


def run(tokenizer: Tokenizer, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """`head` has kind and facts. The answer's map has one of prepared (a `Prepared` as a map), embedding (an
    `EmbeddingWork`), problem, or json (the body is an answer).
    """
    try:
        result = prepare(head["kind"], body, tokenizer, ModelFacts(*head["facts"]))
        if isinstance(result, Prepared):
            return {"prepared": result.to_map()}, b""
        if isinstance(result, EmbeddingWork):
            return {"embedding": result.to_map()}, b""
        answer = to_json(result)
        if len(answer) > MAX_ANSWER:
            raise RequestError(
                f"the answer would have {len(answer)} bytes; at most {MAX_ANSWER} are sent: ask for less"
            )
        return {"json": True}, answer
    except CkdistError as error:
        problem = Problem.of(error)
    except (MemoryError, RecursionError):
        problem = too_much(head["kind"])
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}, b""
    return {"problem": problem.to_map()}, b""


def too_much(kind: str) -> Problem:
    """What to answer when a worker ran into its limits."""
    field = FIELDS.get(kind)
    return Problem(
        400,
        f"rendering and tokenising {field or 'the text'} takes too much time or memory; "
        "send less text, or a simpler grammar or schema",
        field,
    )
