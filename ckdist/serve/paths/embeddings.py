"""Embeddings of texts, and scores of texts: the paths of OpenAI, llama-server, Jina and vLLM."""

from ckdist.serve.answer import LongAnswer
from ckdist.serve.embedding_answer import embeddings, llama_embeddings, ranking, scores
from ckdist.serve.paths.path import Path, Request, Response, Service


async def openai_embeddings(service: Service, request: Request) -> Response:
    """A vector for each text."""
    return LongAnswer(await service.embed(request, "embedding", embeddings))


async def llama_server_embeddings(service: Service, request: Request) -> Response:
    """A vector for each text, in llama-server's format."""
    return LongAnswer(await service.embed(request, "llama_embedding", llama_embeddings))


async def rerank(service: Service, request: Request) -> Response:
    """Documents by their similarity to a query, in the format of Jina, Cohere, vLLM and llama-server."""
    return LongAnswer(await service.embed(request, "rerank", ranking))


async def score(service: Service, request: Request) -> Response:
    """Scores of pairs of texts, in vLLM's format."""
    return LongAnswer(await service.embed(request, "score", scores))


PATHS = (
    Path("/v1/embeddings", openai_embeddings, ("POST",)),
    Path("/embedding", llama_server_embeddings, ("POST",)),
    Path("/v1/rerank", rerank, ("POST",)),
    Path("/v1/reranking", rerank, ("POST",)),
    Path("/v2/rerank", rerank, ("POST",)),
    Path("/score", score, ("POST",)),
)
