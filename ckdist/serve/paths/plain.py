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


TEXTS: tuple[tuple[str, str, str, AnswerForm, bytes], ...] = (  # path, about, kind of `prepare.KINDS`, class, end
    ("/v1/chat/completions", "The answer to a chat.", "chat", ChatAnswer, END_OF_STREAM),
    ("/v1/completions", "The continuation of one or more prompts.", "completion", CompletionAnswer, END_OF_STREAM),
    ("/v1/messages", "The answer to a chat in Anthropic's format.", "messages", AnthropicAnswer, NO_END),
    ("/completion", "The same as /completions.", "llama_completion", LlamaCompletionAnswer, NO_END),
    ("/completions", "llama-server's continuation of prompts.", "llama_completion", LlamaCompletionAnswer, NO_END),
    ("/infill", "The text for a gap between two texts.", "infill", LlamaCompletionAnswer, NO_END),
)
VECTORS = (  # path, about, kind, function that makes the answer
    ("/v1/embeddings", "A vector for each text.", "embedding", embeddings),
    ("/embedding", "A vector for each text, in llama-server's format.", "llama_embedding", llama_embeddings),
    ("/v1/rerank", "Documents by their similarity to a query, as Jina, Cohere and vLLM have it.", "rerank", ranking),
    ("/v1/reranking", "The same as /v1/rerank.", "rerank", ranking),
    ("/v2/rerank", "The same as /v1/rerank.", "rerank", ranking),
    ("/score", "Scores of pairs of texts, in vLLM's format.", "score", scores),
    ("/api/embed", "A vector for each text, in Ollama's format.", "ollama_embed", ollama_vectors),
    ("/api/embeddings", "A vector for one text, in Ollama's older format.", "ollama_embed", ollama_vector),
)
FINISHED = (  # path, about, kind
    ("/v1/messages/count_tokens", "The number of tokens in a chat.", "count_tokens"),
    ("/tokenize", "The token ids of a text or a chat.", "tokenize"),
    ("/detokenize", "The text of token ids.", "detokenize"),
    ("/apply-template", "The text of a chat, as the model would continue it.", "apply_template"),
)
PATHS = tuple(
    Path(name, partial(handle, *row), ("POST",), about)
    for handle, rows in ((_generate, TEXTS), (_embed, VECTORS), (_finish, FINISHED))
    for name, about, *row in rows
)
