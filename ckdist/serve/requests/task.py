"""The work of a text worker for one request: it runs `prepare` and encodes the result for the HTTP process.

The client sees only errors that are raised on purpose. A panic of the tokenizers library or a lack of memory counts as
a fault of the request's text.
"""

from typing import Any

from ckdist.engine.typed_records import converted
from ckdist.errors import CkdistError, RequestError
from ckdist.serve.encoding import to_json
from ckdist.serve.problems import Problem
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.text_records import MAX_ANSWER, Answer, JsonAnswer, Refusal, Task, WorkerFault, too_much
from ckdist.tokens.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, head: dict[str, Any], body: bytes) -> tuple[Answer, bytes]:
    """Runs the `Task` in `head`. Returns the head and the body of the frame with its answer."""
    task = converted(Task, head["task"])
    try:
        result = prepare(task.kind, body, tokenizer, task.facts)
        if not isinstance(result, dict):
            return result, b""
        answer = to_json(result)
        if len(answer) > MAX_ANSWER:
            told = f"the answer would have {len(answer)} bytes; at most {MAX_ANSWER} are sent"
            raise RequestError(f"{told}: ask for less")
        return JsonAnswer(), answer
    except CkdistError as error:
        problem = Problem.of(error)
    except (MemoryError, RecursionError):
        problem = too_much(task.kind)
    except Exception as error:
        return WorkerFault(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"), b""
    return Refusal(**vars(problem)), b""
