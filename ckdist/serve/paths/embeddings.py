"""Texts as vectors, and texts compared by them: OpenAI's, llama-server's, Jina's and vLLM's paths."""

from starlette.requests import Request
from starlette.responses import Response

from ckdist.serve.answer import LongAnswer
from ckdist.serve.embedding_answer import embeddings, llama_embeddings, ranking, scores
from ckdist.serve.paths.path import Path
from ckdist.serve.service import Service


async def openai_embeddings(service: Service, request: Request) -> Response:
    """A vector for each text."""
    return LongAnswer(await service.embed(request, "embedding", embeddings))


async def llama_server_embeddings(service: Service, request: Request) -> Response:
    """The same in llama-server's shape."""
    return LongAnswer(await service.embed(request, "llama_embedding", llama_embeddings))


async def rerank(service: Service, request: Request) -> Response:
    """Documents in the order of their similarity to a query, as Jina, Cohere, vLLM and llama-server have it."""
    return LongAnswer(await service.embed(request, "rerank", ranking))


async def score(service: Service, request: Request) -> Response:
    """How similar pairs of texts are, as vLLM has it."""
    return LongAnswer(await service.embed(request, "score", scores))


PATHS = (
    Path("/v1/embeddings", openai_embeddings, ("POST",)),
    Path("/embedding", llama_server_embeddings, ("POST",)),
    Path("/v1/rerank", rerank, ("POST",)),
    Path("/v1/reranking", rerank, ("POST",)),
    Path("/v2/rerank", rerank, ("POST",)),
    Path("/score", score, ("POST",)),
)
