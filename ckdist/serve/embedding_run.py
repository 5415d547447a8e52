"""The vectors of one HTTP request. Its prompts go to the engine a few at a time; vectors return in any order."""

from typing import Any

import numpy as np

from ckdist.engine.messages import TOKEN_BYTES, Embed, Embedding
from ckdist.errors import EngineError
from ckdist.serve.accounts import Account
from ckdist.serve.encoding import Turns
from ckdist.serve.engine_client import EngineClient, Generation, new_id
from ckdist.serve.metrics import Metrics
from ckdist.serve.problems import Problem
from ckdist.serve.text_records import EmbeddingWork


class EmbeddingRun:
    """Computes the vectors of one request. Await `vectors`, `token_vectors` or `scores` once.

    `max_sequences` is the limit for all requests together.
    """

    def __init__(
        self, client: EngineClient, metrics: Metrics, work: EmbeddingWork, max_sequences: int, account: Account
    ):
        self.work, self.prompt_tokens, self._account = work, 0, account
        self._tenant, self._place = account.tenant(work.cache_salt, work.cache_prompt), account.place(work.place)
        self._client, self._metrics, self._max_sequences = client, metrics, max_sequences
        self._generation = client.generation(account)

    @property
    def progress_at(self) -> float:
        """The time of the last vectors, in seconds of time.monotonic."""
        return self._generation.progress_at

    @property
    def _pools(self) -> bool:
        return self._client.model.get("pooling") != "none"

    async def vectors(self) -> np.ndarray:
        """Returns float32 (prompts, dimensions), as the request asks for them. For pairs: (pairs, 1).

        Raises:
            Problem: 400 if the request asks for more dimensions than the model has, or if the server does not pool;
                429 if there is no room for the first prompt.
        """
        if not self._pools:
            message = "the server gives a vector for each token (--pooling none), which only /embedding answers with"
            raise Problem(400, message)
        return self._finished(np.array(await self._received(), np.float32))

    async def token_vectors(self) -> list[np.ndarray]:
        """Returns a float32 array per prompt: (1, hidden), or unpooled (tokens, hidden). Raises like `vectors`."""
        if self._pools:
            return list((await self.vectors())[:, None])
        return await self._received()

    async def _received(self) -> list[np.ndarray]:
        """Returns one float32 array per prompt: (hidden,) if pooled, else (tokens, hidden)."""
        count, begun, received, turns = len(self.work.prompts), 0, 0, Turns()
        found: list[np.ndarray] = [np.empty(0, np.float32)] * count
        self._account.take_tokens(sum(len(prompt) for prompt in self.work.prompts) // TOKEN_BYTES)
        with self._generation as generation:
            while received < count:
                begun = self._submit(generation, begun)
                for number, message in await generation.next():
                    assert isinstance(message, Embedding), "only `submit` asks for tokens"
                    vector = np.frombuffer(message.vector, "<f4")
                    found[number] = vector if self._pools else vector.reshape(message.prompt_tokens, -1)
                    self.prompt_tokens += message.prompt_tokens
                    self._metrics.prompt_tokens.inc(message.prompt_tokens)
                    self._metrics.cached_tokens.inc(message.cached_tokens)
                    received += 1
                    await turns.end()  # more vectors may arrive meanwhile
        return found

    async def scores(self) -> np.ndarray:
        """Returns float32 (texts,): the score of each text with its query, or with the only query.

        Raises like `vectors`.
        """
        vectors, count = await self.vectors(), self.work.queries
        if not count:  # pairs
            return 1 / (1 + np.exp(-vectors[:, 0])) if self.work.sigmoid else vectors[:, 0]
        return (vectors[:count] * vectors[count:]).sum(axis=1).clip(-1, 1)  # rounding may exceed 1

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}

    def log_fields(self) -> dict[str, int | float | str]:
        """Token counts for the request's log line."""
        return {"prompt_tokens": self.prompt_tokens, "prompts": len(self.work.prompts)}

    def moments(self) -> tuple[float, ...]:
        """Empty: there are no tokens."""
        return ()

    def _submit(self, generation: Generation, begun: int) -> int:
        """Sends prompts to the engine as long as there is room. Returns the number of prompts sent so far."""
        pooling, sequences = (self._client.model.get(name) for name in ("pooling", "sequences"))
        if not isinstance(pooling, str) or type(sequences) is not int:
            raise EngineError("rank 0 has not sent its pooling and sequences")
        while begun < len(self.work.prompts) and generation.running < 2 * sequences:  # enough for two steps
            try:
                self._account.check_places(1, self._max_sequences, self._client.active)
            except Problem:
                if generation.running:
                    break
                raise
            if generation.running and self._account.is_full:
                break
            self._account.check_sequences(1)
            first_text = self.work.first_texts[begun] if self.work.first_texts else 0
            prompt = self.work.prompts[begun]
            generation.submit(begun, Embed(new_id(), prompt, pooling, first_text, self._tenant, self._place))
            begun += 1
        return begun

    def _finished(self, vectors: np.ndarray) -> np.ndarray:
        """Truncates vectors to the wanted dimensions, and normalizes them to length 1 if the request asks for it."""
        wanted, there = self.work.dimensions, vectors.shape[1]
        if wanted > there:
            raise Problem(400, f"dimensions ({wanted}) is more than the {there} of this model", "dimensions")
        vectors = vectors[:, : wanted or there]
        if not self.work.normalise:
            return vectors
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
