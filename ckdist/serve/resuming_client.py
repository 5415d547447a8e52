"""A client of one engine after another: requests outlive an engine that ends, and the next one continues them.

An answer depends on the prompt, the parameters, the seed and the tokens drawn so far. So the seed is chosen here, and
the next engine gets the tokens that the clients already have.
"""

import secrets
from array import array
from dataclasses import replace

import zmq
from msgspec import structs

from ckdist.engine import messages
from ckdist.engine.messages import Embed, Failure, LoadAdapter, Status, Submit, Tokens, UnloadAdapter
from ckdist.serve.engine_client import EngineClient, Generation
from ckdist.serve.problems import Problem
from ckdist.serve.settings import STALE_SECONDS

MAX_CRASHES = 3  # engines that may end while a request runs


class Resumable:
    """A request, and the tokens of its answer so far.

    Attributes:
        skip: Tokens that the engine draws again, because the sampling state does not follow from the tokens.
    """

    def __init__(self, message: Submit | Embed) -> None:
        if isinstance(message, Submit) and message.sampling.seed is None:
            message = structs.replace(message, sampling=replace(message.sampling, seed=secrets.randbits(63)))
        self.message = message
        self.tokens = array("i")
        self.skip = self.crashes = 0

    def next_message(self) -> Submit | Embed:
        """Returns the message for the next engine."""
        if not isinstance(self.message, Submit) or not self.tokens:
            return self.message
        if self.message.sampling.mirostat:
            self.skip = len(self.tokens)
            return self.message
        sampling = replace(self.message.sampling, prompt_logprobs=None)  # they came with the first token
        return structs.replace(self.message, sampling=sampling, drawn=self.tokens.tobytes())

    def take(self, message: Tokens) -> Tokens:
        """Records new tokens. Returns the message without those that the client has."""
        if self.skip:
            known = min(self.skip, len(message.tokens))
            self.skip -= known
            logprobs = None if message.logprobs is None else message.logprobs[known:]
            message = structs.replace(message, tokens=message.tokens[known:], logprobs=logprobs, prompt_logprobs=None)
        self.tokens.extend(message.tokens)
        return message


class ResumingClient(EngineClient):
    """`connect` to each engine, and `disconnect` when it ends. Between engines, requests wait.

    Args:
        endpoint: The address of all engines. Requests are refused until the first one is ready.

    Attributes:
        is_connected: Whether there is an engine, which may still be loading.
        resumed: Requests that were given to a further engine, counted from the start.
    """

    def __init__(self, endpoint: str = "") -> None:
        super().__init__(endpoint, STALE_SECONDS)
        self._refuses_first, self._is_first = bool(endpoint), True  # the first engine, which was not ready yet
        self.is_connected = False
        self.resumed = 0
        self._requests: dict[str, Resumable] = {}  # submitted and not ended; those that accounts hold are not here
        self._flows = False  # the engine has said that it is ready
        self._loaded = set[str]()  # adapters that clients have loaded into the engine, and the next one lacks

    def connect(self, endpoint: str) -> None:
        """Connects to an engine. Once it is ready, it gets all requests."""
        self.endpoint = endpoint
        self.error = self._lost = self._heard_at = None
        self._reported = "loading"
        self.start()

    def start(self) -> None:
        """Connects to the engine at `endpoint`."""
        self.is_connected = True
        super().start()

    def disconnect(self) -> None:
        """Drops the connection. Requests wait for the next engine."""
        if self.is_connected:
            self._drain_socket()
            self._socket.setsockopt(zmq.LINGER, 0)  # the engine is gone, and to wait would stop the event loop
            self.close()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(Problem(503, "the engine has ended; try again later"))
        self.is_connected = self._flows = False
        self.ranks, self.stats, self.adapters = [], {}, None
        self._reported, self._heard_at = "loading", None

    def count_crash(self) -> None:
        """Counts a crash for every request that ran.

        Those that ran in MAX_CRASHES crashes end with 500, and those whose adapter a client has loaded with 503.
        """
        if not self._flows:
            return  # the engine has not begun
        lost, self._loaded = self._loaded, set[str]()
        for key, request in list(self._requests.items()):
            request.crashes += 1
            used = dict(request.message.adapters) if isinstance(request.message, Submit) else {}
            if gone := next((name for name in used if name in lost), ""):
                if (generation := self._end(key)) is not None:
                    reason = f"the engine has ended, and {gone!r} must be loaded again"
                    generation.fail(Problem(503, reason), key)
            elif request.crashes >= MAX_CRASHES and (generation := self._end(key)) is not None:
                message = f"the request was running in {MAX_CRASHES} crashes of the model, so it is not run again"
                generation.fail(Problem(500, message, code="request_crashes_model"), key)

    async def call(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Sends a message and waits until the engine has executed it. Raises Problem if it refuses, or ends."""
        await super().call(message)
        if isinstance(message, LoadAdapter):
            self._loaded.add(message.name)

    def unavailable(self) -> Problem | None:
        """Returns the reason why nothing can be submitted now. An engine that starts again is no reason."""
        if self._lost is None:
            return super().unavailable() if self._refuses_first and self._is_first else None
        return Problem(503, self._lost)

    def _announce(self) -> None:
        if self._lost is not None:
            super()._announce()
        elif self.state == "ready" and not self._flows:
            self._flows, self._is_first = True, False
            # Together: a first step with one of them would make the others wait for the pieces of later steps.
            if self._requests and self._send_together([one.next_message() for one in self._requests.values()]):
                self.resumed += len(self._requests)

    def _send(self, message: messages.ToRank0) -> bool:
        if isinstance(message, (LoadAdapter, UnloadAdapter)) and not self._flows:
            return False
        if not isinstance(message, (Submit, Embed)):
            return not self.is_connected or super()._send(message)
        request = self._requests[message.id] = Resumable(message)
        if not self._flows or super()._send(request.message):
            return True
        del self._requests[message.id]
        return False

    def _handle(self, message: messages.FromRank0) -> None:
        if isinstance(message, Failure) and message.ends_engine:
            return  # the next engine continues it
        if isinstance(message, Status) and message.state == "loading" and not self._is_first:
            message = structs.replace(message, model=self.model)  # requests come meanwhile, and need its facts
        if isinstance(message, Tokens) and (request := self._requests.get(message.id)) is not None:
            message = request.take(message)
        super()._handle(message)

    def _end(self, sequence_id: str | None) -> Generation | None:
        if sequence_id is not None:
            self._requests.pop(sequence_id, None)
        return super()._end(sequence_id)
