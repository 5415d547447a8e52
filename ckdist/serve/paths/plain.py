"""Paths without a handler of their own: a text worker prepares the request, and a function makes the answer.

They are those of OpenAI, Anthropic, llama-server, vLLM, Jina and Ollama for texts, vectors and tokens.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from ckdist.serve.answer import END_OF_STREAM, NO_END, LongAnswer
from ckdist.serve.anthropic_answer import AnthropicAnswer
from ckdist.serve.chat_answer import ChatAnswer
from ckdist.serve.completions import CompletionAnswer
from ckdist.serve.embedding_answer import embeddings, llama_embeddings, ranking, scores
from ckdist.serve.llama_answer import LlamaCompletionAnswer
from ckdist.serve.ollama_answer import ollama_vector, ollama_vectors
from ckdist.serve.openai_answer import Source
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.service import AnswerForm

if TYPE_CHECKING:
    from ckdist.serve.embedding_run import EmbeddingRun


async def _generate(kind: str, form: AnswerForm, end: bytes, service: Service, request: Request) -> Response:
    return await service.answer(request, await service.prepare(kind, request), form, end)


async def _embed(
    kind: str,
    form: Callable[["EmbeddingRun", Source], Awaitable[list[bytes]]],
    service: Service,
    request: Request,
) -> Response:
    return LongAnswer(await service.embed(request, kind, form))


async def _finish(kind: str, service: Service, request: Request) -> Response:
    return LongAnswer(await service.finished(kind, request))


# Path -> (kind of request of `prepare.KINDS`, the class of the answer, the end of a stream).
TEXTS: dict[str, tuple[str, AnswerForm, bytes]] = {
    "/v1/chat/completions": ("chat", ChatAnswer, END_OF_STREAM),
    "/v1/completions": ("completion", CompletionAnswer, END_OF_STREAM),
    "/v1/messages": ("messages", AnthropicAnswer, NO_END),
    "/completion": ("llama_completion", LlamaCompletionAnswer, NO_END),
    "/completions": ("llama_completion", LlamaCompletionAnswer, NO_END),
    "/infill": ("infill", LlamaCompletionAnswer, NO_END),
}
# Path -> (kind of request, the function that makes the answer of the vectors).
VECTORS = {
    "/v1/embeddings": ("embedding", embeddings),
    "/embedding": ("llama_embedding", llama_embeddings),
    "/v1/rerank": ("rerank", ranking),
    "/v1/reranking": ("rerank", ranking),
    "/v2/rerank": ("rerank", ranking),
    "/score": ("score", scores),
    "/api/embed": ("ollama_embed", ollama_vectors),
    "/api/embeddings": ("ollama_embed", ollama_vector),
}
# Path -> kind of request. The text worker makes the answer.
FINISHED = {
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/apply-template": "apply_template",
}
PATHS = (
    *(Path(name, partial(_generate, *row), ("POST",)) for name, row in TEXTS.items()),
    *(Path(name, partial(_embed, *row), ("POST",)) for name, row in VECTORS.items()),
    *(Path(name, partial(_finish, kind), ("POST",)) for name, kind in FINISHED.items()),
)
