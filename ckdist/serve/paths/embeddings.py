"""Texts as vectors, and texts compared by them: OpenAI's, llama-server's, Jina's and vLLM's paths."""

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import Request
from fastapi.responses import Response

from ckdist.serve.answer import LongAnswer
from ckdist.serve.embedding_answer import embeddings, llama_embeddings, ranking, scores
from ckdist.serve.embedding_run import EmbeddingRun
from ckdist.serve.openai_answer import Source
from ckdist.serve.paths.path import Path
from ckdist.serve.service import Service

Form = Callable[[EmbeddingRun, Source], Awaitable[list[bytes]]]


async def _answer(kind: str, form: Form, service: Service, request: Request) -> Response:
    """What `form` makes of the vectors of a request of this kind."""
    return LongAnswer(await service.embed(request, kind, form))


_embeddings = partial(_answer, "embedding", embeddings)
_rerank = partial(_answer, "rerank", ranking)
PATHS = (
    Path("/v1/embeddings", _embeddings, ("POST",)),
    Path("/embedding", partial(_answer, "llama_embedding", llama_embeddings), ("POST",)),
    Path("/v1/rerank", _rerank, ("POST",)),
    Path("/v1/reranking", _rerank, ("POST",)),
    Path("/v2/rerank", _rerank, ("POST",)),
    Path("/score", partial(_answer, "score", scores), ("POST",)),
)
