"""The vectors of one HTTP request, however they arrive."""

import asyncio
from types import SimpleNamespace

import numpy as np

from ckdist.engine.messages import Embed, Embedding
from ckdist.serve import embedding_run
from ckdist.serve.accounts import Account
from ckdist.serve.embedding_run import EmbeddingRun
from ckdist.serve.engine_client import Generation
from ckdist.serve.text_records import EmbeddingWork


class Client:
    """An engine that is told which vectors arrive, and when."""

    model = {"pooling": "mean", "sequences": 8}
    active = 0

    def __init__(self):
        self.ids: list[str] = []
        self.made: Generation | None = None

    def generation(self, account: Account) -> Generation:
        self.made = Generation(self, account)
        return self.made

    def submit(self, generation: Generation, message: Embed) -> None:
        self.ids.append(message.id)
        if len(self.ids) == 2:
            asyncio.get_running_loop().call_soon(self.deliver, 0, 1.0, 2.0)

    def deliver(self, number: int, *numbers: float) -> None:
        vector = np.array(numbers, "<f4").tobytes()
        self.made.deliver(Embedding(self.ids[number], vector, prompt_tokens=1, cached_tokens=0))


def test_a_vector_that_arrives_while_another_is_read_is_waited_for(monkeypatch):
    client = Client()

    class Turns:
        """The loop's other work delivers the second vector in the turn behind the first."""

        async def end(self) -> None:
            if client.made.running:
                client.deliver(1, 3.0, 4.0)

    monkeypatch.setattr(embedding_run, "Turns", Turns)
    work = EmbeddingWork([b"text", b"more"], normalise=False)
    count = SimpleNamespace(inc=lambda _: None)
    metrics = SimpleNamespace(prompt_tokens=count, cached_tokens=count)
    run = EmbeddingRun(client, metrics, work, 4, Account())

    assert (
        asyncio.run(asyncio.wait_for(run.vectors(), 10)).tolist() == [[1.0, 2.0], [3.0, 4.0]] and run.prompt_tokens == 2
    )
