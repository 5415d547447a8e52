"""The HTTP application: its paths, each a few lines from request to answer."""

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ckdist.errors import CkdistError, EngineError
from ckdist.serve.access import Access
from ckdist.serve.answer import ClientGone, EventStream, json_answer, problem_answer, while_connected
from ckdist.serve.body import read_body
from ckdist.serve.chat import ChatAnswer
from ckdist.serve.completions import CompletionAnswer
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.metrics import Metrics
from ckdist.serve.problems import Problem
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.serve.run import Run
from ckdist.serve.settings import HttpSettings
from ckdist.serve.text_work import TextWork

MODEL_FACTS = ("architecture", "vocab_size", "context_length", "num_parameters", "size_bytes")


class Service:
    """What the paths work with. `tokenizer` is None until it is loaded."""

    def __init__(self, settings: HttpSettings, client: EngineClient):
        self.settings, self.client = settings, client
        self.tokenizer = None
        self.draining = False
        self.created = int(time.time())
        self.metrics = Metrics(lambda: self.state, lambda: client.active, lambda: client.stats)

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
        return ModelFacts(self.settings.model_name, self.vocab_size, self.context_length)

    async def prepare(self, kind: str, request: Request) -> Any:
        """What the request's body comes to (see `serve.requests.prepare`), once the server is ready for it."""
        self.check_ready()
        body = await read_body(request, self.settings.max_body)
        return await TextWork(self.tokenizer).prepare(kind, body, self.facts)

    async def answer(self, request: Request, prepared: Prepared, form: type[ChatAnswer] | type[CompletionAnswer]) -> Response:
        """The answer as JSON, or as the stream that was asked for."""
        run = Run(self.client, self.tokenizer, self.metrics, prepared, self.settings.max_sequences)
        answer, timeout = form(run, self.tokenizer, self.settings.model_name), self.settings.timeout
        if prepared.stream:
            return EventStream(answer.events(), lambda: run.progress_at, timeout)
        return json_answer(await while_connected(request.receive, answer.whole(), lambda: run.progress_at, timeout))


def create_app(service: Service) -> Access:
    """The ASGI application over `service`."""
    app = FastAPI(title="ckdist", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_error_answers(app)

    @app.get("/health")
    async def health() -> Response:
        service.check_ready()
        return json_answer({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.settings.model_name:
            raise Problem(404, f"there is no model {name[:200]!r}; this server has {service.settings.model_name!r}", "model", "model_not_found")
        return json_answer(_model(service))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, await service.prepare("chat", request), ChatAnswer)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.answer(request, await service.prepare("completion", request), CompletionAnswer)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return json_answer(await service.prepare("tokenize", request))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return json_answer(await service.prepare("detokenize", request))

    paths = frozenset(route.path for route in app.routes)
    return Access(app, service.settings.api_keys, service.metrics, paths)


def _add_error_answers(app: FastAPI) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        return problem_answer(Problem.of(error))

    async def refuse_path(request: Request, error: HTTPException) -> Response:
        return problem_answer(Problem(error.status_code, f"{request.method} {request.url.path[:200]!r}: {error.detail}"))

    async def nobody_listens(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    for kind, answer in ((CkdistError, refuse), (Exception, refuse), (HTTPException, refuse_path), (ClientGone, nobody_listens), (ClientDisconnect, nobody_listens)):
        app.add_exception_handler(kind, answer)


def _model(service: Service) -> dict:
    known = {name: service.client.model[name] for name in MODEL_FACTS if name in service.client.model}
    return {"id": service.settings.model_name, "object": "model", "created": service.created, "owned_by": "ckdist", "meta": known}
