"""Answers with embeddings or with scores of texts, as JSON in parts."""

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ckdist.serve.encoding import Turns, to_json
from ckdist.serve.openai_answer import Source, new_head

if TYPE_CHECKING:
    import numpy as np

    from ckdist.serve.embedding_run import EmbeddingRun


async def embeddings(run: "EmbeddingRun", source: Source) -> list[bytes]:
    """Returns OpenAI's list of embeddings."""
    vectors = await run.vectors()
    form = _base64 if run.work.base64 else _floats
    data = ({"object": "embedding", "index": i, "embedding": form(vector)} for i, vector in enumerate(vectors))
    begin = to_json({"object": "list", "model": source.model, "usage": run.usage()})[:-1] + b',"data":['
    return await _list(begin, data, b"]}")


async def llama_embeddings(run: "EmbeddingRun", source: Source) -> list[bytes]:
    """Returns llama-server's list: for each input a list with one vector, or with one vector per token."""
    del source  # this answer does not name the model
    answer = [b"["]
    for i, rows in enumerate(await run.token_vectors()):
        begin = b'%s{"index":%d,"embedding":[' % (b"," if i else b"", i)
        answer += await _list(begin, map(_floats, rows), b"]}")
    return [*answer, b"]"]


async def ranking(run: "EmbeddingRun", source: Source) -> list[bytes]:
    """Returns the documents of /v1/rerank, the most similar first. For text-embeddings-inference it is a plain list."""
    scores = await run.scores()
    order = (-scores).argsort(kind="stable")[: run.work.best]
    texts = run.work.texts
    plain, results = run.work.plain, list[dict[str, Any]]()
    for i in order.tolist():
        results.append({"index": i, "score" if plain else "relevance_score": float(scores[i])})
        if texts:
            results[-1] |= {"text": texts[i]} if plain else {"document": {"text": texts[i]}}
    if plain:
        return [to_json(results)]
    return [to_json({**new_head("list", "rerank", source), "results": results, "usage": run.usage()})]


async def scores(run: "EmbeddingRun", source: Source) -> list[bytes]:
    """Returns vLLM's list of scores."""
    found = (await run.scores()).tolist()
    data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(found)]
    return [to_json({**new_head("list", "score", source), "data": data, "usage": run.usage()})]


async def _list(begin: bytes, items: Iterable[Any], end: bytes) -> list[bytes]:
    """Encodes a list of long items between `begin` and `end`, and yields to the event loop in between."""
    turns, parts = Turns(), [begin]
    for item in items:
        parts.append((b"," if len(parts) > 1 else b"") + to_json(item))
        await turns.end()
    return [*parts, end]


def _floats(vector: "np.ndarray") -> list[float]:
    return vector.tolist()


def _base64(vector: "np.ndarray") -> str:
    """Little-endian float32, which OpenAI's clients expect."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
