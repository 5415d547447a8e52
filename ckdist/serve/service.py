"""What the paths of the HTTP application work with: the engine's client, the tokenizer, the metrics, and what was
set.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ckdist import __version__
from ckdist.errors import EngineError
from ckdist.serve.answer import END_OF_STREAM, EventStream, LongAnswer, while_connected
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json_in_turns
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.metrics import Metrics
from ckdist.serve.openai_answer import Source
from ckdist.serve.problems import Problem
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.serve.run import Run
from ckdist.serve.settings import HttpSettings
from ckdist.serve.text_work import TextWork

MODEL_FACTS = ("architecture", "vocab_size", "context_length", "num_parameters", "size_bytes")
MAX_NAMES = 1000  # of unknown fields that are remembered

log = logging.getLogger(__name__)


class Service:
    """What the paths work with. `tokenizer`, the model's `Vocabulary`, is None until `text` has started."""

    def __init__(self, settings: HttpSettings, client: EngineClient):
        self.settings, self.client = settings, client
        self.text = TextWork(settings.model, settings.overrides)
        self.tokenizer = None
        self.draining = False
        self.created = int(time.time())
        self.metrics = Metrics(settings.model_name, lambda: self.state, lambda: client.active, lambda: client.stats)
        self._ignored: set[str] = set()

    @property
    def state(self) -> str:
        state = self.client.state
        if state == "ready" and self.draining:
            return "draining"
        if state == "ready" and self.tokenizer is None:
            return "loading"
        return state

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding; a tokenizer may know fewer tokens."""
        return int(self.client.model.get("vocab_size") or self.tokenizer.vocab_size)

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its output may have in all, by rank 0's status."""
        length = self.client.model.get("context_length")
        if type(length) is not int:
            raise EngineError("rank 0 has not said how long its context is (context_length)")
        return length

    def check_ready(self) -> None:
        """Problem 503 unless requests can be answered."""
        if self.draining:
            raise Problem(503, "the server is shutting down")
        problem = self.client.unavailable()
        if problem is None and self.tokenizer is None:
            problem = Problem(503, "the tokenizer is loading; try again soon")
        if problem is not None:
            raise problem

    @property
    def facts(self) -> ModelFacts:
        settings = self.settings
        return ModelFacts(settings.model_name, self.vocab_size, self.context_length, settings.strict_fields)

    @property
    def known_model(self) -> dict[str, Any]:
        """What rank 0 has said of the model, of the things that clients may know."""
        return {name: self.client.model[name] for name in MODEL_FACTS if name in self.client.model}

    @property
    def source(self) -> Source:
        digest = hashlib.blake2b(json.dumps([self.settings.model_name, self.known_model]).encode(), digest_size=4)
        return Source(self.settings.model_name, f"ckdist-{__version__}-{digest.hexdigest()}")

    async def prepare(self, kind: str, request: Request, body: bytes | None = None) -> Prepared | list[bytes]:
        """What the request's body, or the one given, comes to (see `TextWork.prepare`), once the server is ready for
        it.
        """
        self.check_ready()
        if body is None:
            body = await read_body(request, self.settings.max_body)
        begun, work = time.monotonic(), self.text.prepare(kind, body, self.facts)
        prepared = await while_connected(request.receive, work, lambda: begun, self.settings.timeout)
        if isinstance(prepared, Prepared):
            self._report(prepared.ignored)
        return prepared

    async def answer(
        self, request: Request, prepared: Prepared, form: Callable[..., Any], end: bytes = END_OF_STREAM
    ) -> Response:
        """The answer as JSON, or as the stream that was asked for. `form` is the class of the answer; `end` ends its
        stream.
        """
        run = Run(self.client, self.tokenizer, self.metrics, prepared, self.settings.max_sequences)
        answer, timeout = form(run, self.tokenizer, self.source), self.settings.timeout
        if prepared.stream:
            return EventStream(answer.events(), lambda: run.progress_at, timeout, end)
        whole = await while_connected(request.receive, answer.whole(), lambda: run.progress_at, timeout)
        return LongAnswer([await to_json_in_turns(whole)])

    def _report(self, ignored: tuple[str, ...]) -> None:
        """Says of each unknown field once that it is ignored."""
        for name in ignored:
            if name not in self._ignored and len(self._ignored) < MAX_NAMES:
                self._ignored.add(name)
                log.warning(
                    "requests have a field %r, which is not known and ignored (--strict-fields refuses it)", name
                )
