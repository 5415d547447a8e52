"""The HTTP application: its paths, each a few lines from request to answer."""

import time

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ckdist.engine.sampling import SamplingParams
from ckdist.errors import CkdistError, EngineError, RequestError
from ckdist.serve import prompt
from ckdist.serve.access import Access
from ckdist.serve.answer import ClientGone, EventStream, json_answer, problem_answer, while_connected
from ckdist.serve.body import read_json
from ckdist.serve.chat import ChatAnswer
from ckdist.serve.chat_request import parse_chat
from ckdist.serve.completion_request import CompletionRequest, parse_completion
from ckdist.serve.completions import CompletionAnswer
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.fields import Fields
from ckdist.serve.metrics import Metrics
from ckdist.serve.problems import Problem
from ckdist.serve.run import Run, Work
from ckdist.serve.sampling_fields import Asked, with_logprobs
from ckdist.serve.settings import HttpSettings

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

    async def object_of(self, request: Request) -> dict:
        """The request's JSON object, once the server is ready for it."""
        self.check_ready()
        return await read_json(request, self.settings.max_body)

    def run(self, work: Work) -> Run:
        return Run(self.client, self.tokenizer, self.metrics, work, self.settings.max_sequences)

    async def answer(self, request: Request, answer: ChatAnswer | CompletionAnswer, asked: Asked) -> Response:
        """The answer as JSON, or as the stream that was asked for."""
        run, timeout = answer.run, self.settings.timeout
        if asked.stream:
            return EventStream(answer.events(asked.include_usage), lambda: run.progress_at, timeout)
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
        asked_for = parse_chat(await service.object_of(request), service.vocab_size)
        asked = asked_for.asked
        tokens = await prompt.render_chat(service.tokenizer, asked_for.messages, asked_for.add_generation_prompt, asked_for.template_kwargs)
        room = prompt.fit_output(tokens, asked.max_tokens, service.context_length, "messages")
        sampling = with_logprobs(asked.sampling, asked_for.logprobs, of_prompt=False)
        run = service.run(Work([tokens], [room], sampling, asked.n, asked.stops))
        answer = ChatAnswer(run, service.tokenizer, service.settings.model_name, asked_for.logprobs is not None)
        return await service.answer(request, answer, asked)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked_for = parse_completion(await service.object_of(request), service.vocab_size)
        asked = asked_for.asked
        run = service.run(await _completion_work(service, asked_for))
        answer = CompletionAnswer(run, service.tokenizer, service.settings.model_name, asked_for.logprobs is not None)
        return await service.answer(request, answer, asked)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = Fields(await service.object_of(request))
        fields.refuse_unknown(("content", "add_special", "parse_special", "with_pieces"), {})
        content = fields.text("content")
        if content is None:
            raise RequestError("content is needed: the text to tokenise", "content")
        fields.switch("parse_special")
        tokens = await prompt.encode(service.tokenizer, content, add_special=fields.switch("add_special"))
        if fields.switch("with_pieces"):
            return json_answer({"tokens": [{"id": token, "piece": _piece(service.tokenizer, token)} for token in tokens]})
        return json_answer({"tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = Fields(await service.object_of(request))
        fields.refuse_unknown(("tokens",), {})
        if fields.value("tokens", list) is None:
            raise RequestError("tokens is needed: a list of token ids", "tokens")
        tokens = fields.token_ids("tokens", service.vocab_size, service.settings.max_body)
        return json_answer({"content": service.tokenizer.decode(tokens)})

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


async def _completion_work(service: Service, asked_for: CompletionRequest) -> Work:
    prompts, echo = [], []
    for given in asked_for.prompts:
        is_text = isinstance(given, str)
        tokens = await prompt.encode(service.tokenizer, given, add_special=True) if is_text else list(given)
        prompts.append(tokens)
        if asked_for.echo:
            echo.append(given if is_text else service.tokenizer.decode(tokens))
    asked = asked_for.asked
    max_tokens = [prompt.fit_output(tokens, asked.max_tokens, service.context_length, "prompt") for tokens in prompts]
    sampling: SamplingParams = with_logprobs(asked.sampling, asked_for.logprobs, of_prompt=asked_for.echo)
    return Work(prompts, max_tokens, sampling, asked.n, asked.stops, echo if asked_for.echo else None)


def _model(service: Service) -> dict:
    known = {name: service.client.model[name] for name in MODEL_FACTS if name in service.client.model}
    return {"id": service.settings.model_name, "object": "model", "created": service.created, "owned_by": "ckdist", "meta": known}


def _piece(tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are no whole characters; as llama-server does."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
