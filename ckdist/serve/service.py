"""The state that all paths of the HTTP application share: engine client, tokenizer, metrics and settings."""

import asyncio
import hashlib
import importlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from ckdist import __version__
from ckdist.engine.messages import AdapterScales, pack_tokens, unpack_tokens
from ckdist.engine.queue_place import NO_CLIENT
from ckdist.errors import EngineError
from ckdist.serve.accounts import Account, Accounts
from ckdist.serve.answer import END_OF_STREAM, EventStream, LongAnswer, while_connected
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json_in_turns
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.machine_events import Machine
from ckdist.serve.metrics import Metrics
from ckdist.serve.openai_answer import Source
from ckdist.serve.problems import Problem
from ckdist.serve.request_log import MAX_PROMPT_TOKENS, note_run
from ckdist.serve.requests.adapter_choice import read_adapters
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.response_store import ResponseStore
from ckdist.serve.run import Run
from ckdist.serve.saved_slots import SavedSlots, Slot
from ckdist.serve.settings import HttpSettings
from ckdist.serve.text_records import EmbeddingWork, ModelFacts, Prepared
from ckdist.serve.text_work import TextWork
from ckdist.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    from ckdist.serve.batch_runner import BatchRunner
    from ckdist.serve.embedding_run import EmbeddingRun

MODEL_FACTS = ("architecture", "vocab_size", "context_length", "num_parameters", "size_bytes")
MAX_NAMES = 1000  # unknown fields and types of tools that are remembered

log = logging.getLogger(__name__)


class Answer(Protocol):
    """The answer to one request, in the format of one API."""

    async def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns the complete answer."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the parts of the answer as server-sent events."""
        ...


AnswerForm: TypeAlias = Callable[[Run, Vocabulary, Source], Answer]


class Service:
    """The shared state. `tokenizer`, the model's `Vocabulary`, is None until `text` has started."""

    def __init__(self, settings: HttpSettings, client: EngineClient):
        self.settings, self.client = settings, client
        keys = (*settings.api_keys, *settings.file_keys)
        self.accounts = Accounts(keys, settings.shared_cache, settings.key_limits)
        folder = settings.slot_save_path
        self.slots = None if folder is None else SavedSlots(folder, settings.parallel, settings.model_name)
        self.kept = ResponseStore(settings.store_responses)
        self.text = TextWork(settings.model, settings.overrides)
        self.tokenizer: Vocabulary | None = None
        self.adapters_of_all: AdapterScales = ()  # of POST /lora-adapters, for requests that name none
        self.copies: set[str] = set()  # further names of the model that clients have given
        self.draining = False
        self.batches: BatchRunner | None = None  # of --batch-dir
        self.rests = False  # its engine is not loaded, and the next request loads it
        self.prefilling = settings.prefill_file is not None  # its prompts are not computed yet
        self.created = int(time.time())
        self.machine = Machine(client, lambda: self._machine_facts, lambda: self.state)
        self.metrics = Metrics(settings.model_name, lambda: self.state, lambda: client.active, lambda: client.stats)
        self._told: set[str] = set()

    @property
    def state(self) -> str:
        """The engine's state, but loading until the tokenizer is there and the prompts of --prefill-file are computed,
        and draining once this process shall end.
        """
        state = "ready" if self.rests else self.client.state
        if state == "ready" and self.draining:
            return "draining"
        if state == "ready" and not self.rests and (self.tokenizer is None or self.prefilling):
            return "loading"
        return state

    @property
    def has_started(self) -> bool:
        """True if prompts can be computed, those of --prefill-file too."""
        return self.client.state == "ready" and self.tokenizer is not None

    is_crowded = False  # its engine runs no other model

    def check_model(self, body: dict[str, Any]) -> None:
        """Raises Problem or RequestError if a request names an unknown adapter. Without adapters, any name is known."""
        if self.adapters is not None:
            read_adapters(Fields(body), self.facts)

    def cannot_load(self, name: Any) -> bool:  # noqa: ARG002
        """Returns False: its engine has started."""
        return False

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding; a tokenizer may know fewer tokens."""
        return int(self.client.model.get("vocab_size") or self.loaded_tokenizer().vocab_size)

    @property
    def context_length(self) -> int:
        """The maximum of prompt and output tokens together, from rank 0's status."""
        length = self.client.model.get("context_length")
        if type(length) is not int:
            raise EngineError("rank 0 has not sent its context_length")
        return length

    def check_ready(self) -> None:
        """Raises Problem 503 unless requests can be answered."""
        if self.draining:
            raise Problem(503, "the server is shutting down")
        problem = self.client.unavailable()
        if problem is not None:
            raise problem
        self.loaded_tokenizer()
        if self.prefilling:
            raise Problem(503, "the prompts of --prefill-file are being computed; try again soon")

    def loaded_tokenizer(self) -> Vocabulary:
        """Returns the tokenizer's vocabulary. Raises Problem 503 while it loads, or loads again."""
        if self.tokenizer is None:
            raise Problem(503, "the tokenizer is loading; try again soon")
        return self.tokenizer

    @property
    def facts(self) -> ModelFacts:
        """The facts that are needed to prepare a request."""
        settings = self.settings
        name, sizes = settings.model_name, (self.vocab_size, self.context_length)
        names = (*settings.aliases, *self.copies)
        scores, encodes = str(self.client.model.get("scores", "")), bool(self.client.model.get("encodes"))
        return ModelFacts(
            name, *sizes, settings.strict_fields, scores, encodes, settings.defaults, self.adapters,
            self.adapters_of_all, settings.special_tokens_in_text, names,
            str(self.client.model.get("rank_template", "")),
        )  # fmt: skip

    @property
    def adapters(self) -> dict[str, int] | None:
        """Ids of the adapters by name. None: the server has no places for adapters."""
        return self.client.adapters

    @property
    def known_model(self) -> dict[str, Any]:
        """The model's facts from rank 0 that clients may know."""
        return {name: self.client.model[name] for name in MODEL_FACTS if name in self.client.model}

    @property
    def _machine_facts(self) -> dict[str, Any]:
        settings = self.settings
        most = {"most_running": settings.parallel, "most_waiting": settings.max_sequences - settings.parallel}
        return {"model": {"id": settings.model_name, **self.known_model}, **most}

    @property
    def source(self) -> Source:
        """The name and the fingerprint of the model."""
        return self._source(())

    def _source(self, adapters: AdapterScales) -> Source:
        name = adapters[0][0] if len(adapters) == 1 else self.settings.model_name
        digest = hashlib.blake2b(json.dumps([name, self.known_model]).encode(), digest_size=4)
        return Source(name, f"ckdist-{__version__}-{digest.hexdigest()}")

    async def prepare(self, kind: str, request: Request, body: bytes | None = None) -> Prepared:
        """Prepares the request's body, or `body` (see `TextWork.prepare`). `kind` must need the engine."""
        return self._checked(kind, await self._text_work(kind, request, body))

    async def prepare_body(self, kind: str, body: bytes) -> Prepared:
        """Prepares a body of the operator, which no client waits for."""
        return self._checked(kind, await self.text.prepare(kind, body, self.facts, NO_CLIENT))

    def _checked(self, kind: str, prepared: Prepared | EmbeddingWork | list[bytes]) -> Prepared:
        assert isinstance(prepared, Prepared), f"{kind} needs no engine"
        self._report(prepared.ignored, prepared.skipped)
        return prepared

    async def finished(self, kind: str, request: Request, body: bytes | None = None) -> list[bytes]:
        """Returns the answer as JSON in parts. `kind` must not need the engine.

        `body` replaces the request's body.
        """
        parts = await self._text_work(kind, request, body)
        assert isinstance(parts, list), f"{kind} needs the engine"
        return parts

    async def embed(
        self, request: Request, kind: str, form: Callable[["EmbeddingRun", Source], Awaitable[list[bytes]]]
    ) -> list[bytes]:
        """Returns the answer to a request for vectors, as JSON in parts. `form` makes it from the vectors."""
        work = await self._text_work(kind, request, None)
        assert isinstance(work, EmbeddingWork), f"{kind} asks for no vectors"
        self._report(work.ignored)
        settings = self.settings
        # NumPy is a third of what this process would import. So only servers that embed have it, and a thread loads it.
        module = await asyncio.to_thread(importlib.import_module, "ckdist.serve.embedding_run")
        run: EmbeddingRun = module.EmbeddingRun(
            self.client, self.metrics, work, settings.max_sequences, self._account(request)
        )
        note_run(run)
        answer = form(run, self.source)
        return await while_connected(request.receive, answer, lambda: run.progress_at, settings.timeout)

    async def _text_work(
        self, kind: str, request: Request, body: bytes | None
    ) -> Prepared | EmbeddingWork | list[bytes]:
        self.check_ready()
        if body is None:
            body = await read_body(request, self.settings.max_body)
        client = self._account(request).client
        begun, work = time.monotonic(), self.text.prepare(kind, body, self.facts, client)
        return await while_connected(request.receive, work, lambda: begun, self.settings.timeout)

    async def answer(
        self,
        request: Request,
        prepared: Prepared,
        form: AnswerForm,
        end: bytes = END_OF_STREAM,
    ) -> Response:
        """Returns the answer as JSON, or as a stream if the request asks for that.

        `form` is the class of the answer. `end` is sent after the last event of a stream.
        """
        tokenizer, run = self.loaded_tokenizer(), self._run(prepared, self._account(request))
        answer, timeout = form(run, tokenizer, self._source(prepared.adapters)), self.settings.timeout
        if prepared.stream:
            return EventStream(answer.events(), lambda: run.progress_at, timeout, self.settings.stall_timeout, end)
        whole = await while_connected(request.receive, answer.whole(), lambda: run.progress_at, timeout)
        return LongAnswer([await to_json_in_turns(whole)])

    async def prefill(self, prepared: Prepared, account: Account, request: Request | None = None) -> dict[str, Any]:
        """Computes prompts for later requests. Returns the answer of /v1/cache/prefill.

        `request`: the one that waits; None: no client does.
        """
        run = self._run(prepared, account)
        if request is None:
            await run.whole()
        else:
            await while_connected(request.receive, run.whole(), lambda: run.progress_at, self.settings.timeout)
        usage = run.usage()
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"prompt_tokens": prompt, "cached_tokens": cached, "computed_tokens": prompt - cached}
        return {"object": "cache.prefill", "model": self.settings.model_name, **counts}

    def _run(self, prepared: Prepared, account: Account) -> Run:
        tokenizer = self.loaded_tokenizer()  # its process may have ended since the request was prepared
        run = Run(self.client, tokenizer, self.metrics, prepared, self.settings.max_sequences, account)
        if self.slots is not None and prepared.cache_prompt:
            slots, prompt = self.slots, prepared.prompts[0]
            if prepared.slot >= 0:
                slots.check(prepared.slot)
            kept = lambda tokens: Slot(prompt + pack_tokens(tokens), prepared.cache_salt)
            run.on_first = lambda tokens: slots.note(account, prepared.slot, kept(tokens))
        note_run(run, self._logged_prompt(tokenizer, prepared) if self.settings.log_prompts else None)
        return run

    @staticmethod
    def _logged_prompt(tokenizer: Vocabulary, prepared: Prepared) -> str:
        decoder = tokenizer.decoder(skip_special=False)
        return "".join(decoder.step(token) for token in unpack_tokens(prepared.prompts[0])[:MAX_PROMPT_TOKENS])

    def _account(self, request: Request) -> Account:
        return request.scope["ckdist.account"]

    def _report(self, ignored: tuple[str, ...], skipped: tuple[str, ...] = ()) -> None:
        """Logs each unknown field and each skipped type of tools once."""
        told = {f"an unknown field {name!r}, which is ignored (--strict-fields refuses it)" for name in ignored}
        told |= {f"tools of type {kind!r}, which are not supported and left out" for kind in skipped}
        for text in sorted(told - self._told):
            if len(self._told) < MAX_NAMES:
                self._told.add(text)
                log.warning("requests have %s", text)
