"""The HTTP process's client of rank 0: it submits sequences, receives tokens and follows rank 0's state.

It reads one DEALER socket in callbacks of the event loop: zmq's asyncio sockets cost a future per message, and a
busy engine sends thousands per second. It knows the messages of `ckdist.engine.messages`, but neither text nor HTTP.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from ckdist.engine import messages as records
from ckdist.serve.accounts import Account, HeldMessage
from ckdist.serve.encoding import TURN_SECONDS
from ckdist.serve.problems import Problem

ROUTING_ID = b"http"  # fixed, so that rank 0 can send its status before it receives a message
MAX_UNSENT = 10_000
TICK_SECONDS = 0.25

log = logging.getLogger(__name__)


class Generation:
    """The sequences of one HTTP request. Leaving its `with` block aborts the unfinished ones."""

    def __init__(self, client: "EngineClient", account: Account):
        self._client, self.account = client, account
        self._ids: dict[str, int] = {}  # numbers of the running sequences
        self._prompt_tokens: dict[int, int] = {}
        self._has_tokens = False
        self._arrived: deque[tuple[int, records.Tokens | records.Embedding]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._problem: Problem | None = None
        self.progress_at = time.monotonic()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        # The last ones first: they may wait for places of the first ones, and would start when those end.
        for number in reversed(list(self._ids.values())):
            self.abort(number)

    @property
    def running(self) -> int:
        """The number of unfinished sequences."""
        return len(self._ids)

    def submit(self, number: int, message: records.Submit | records.Embed) -> None:
        """Starts sequence `number`, or requests its vector. Raises Problem 503 if the engine accepts nothing."""
        self._prompt_tokens[number] = len(message.prompt) // records.TOKEN_BYTES
        self._client.submit(self, message)
        self._ids[message.id] = number

    def abort(self, number: int) -> None:
        """Ends sequence `number`. Messages of it that arrive later are dropped."""
        for sequence_id in [key for key, value in self._ids.items() if value == number]:
            del self._ids[sequence_id]
            self._client.abort(sequence_id)

    async def next(self) -> list[tuple[int, records.Tokens | records.Embedding]]:
        """Waits for records. Returns all that arrived since the last call, as (sequence number, message).

        Raises a Problem if the engine refused a sequence, failed or became silent.
        """
        while not self._arrived:
            if self._problem is not None:
                raise self._problem
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived = list(self._arrived)
        self._arrived.clear()
        self.progress_at = time.monotonic()
        return arrived

    def deliver(self, message: records.Tokens | records.Embedding) -> None:
        """Takes a message of one of the sequences."""
        number = self._ids[message.id]
        if isinstance(message, records.Embedding) or message.finish_reason is not None:
            del self._ids[message.id]
        if isinstance(message, records.Tokens):
            self._has_tokens = self._has_tokens or bool(message.tokens)
        self._arrived.append((number, message))
        self._wake()

    def end_early(self, problem: Problem) -> None:
        """Ends the sequences with the tokens that they have, as if they had reached their limit.

        If no sequence has a token, they end with `problem`.
        """
        if not self._has_tokens:
            self.fail(problem)
            return
        for sequence_id, number in list(self._ids.items()):
            self._client.abort(sequence_id)
            self._arrived.append((number, records.Tokens(sequence_id, [], "length", self._prompt_tokens[number])))
        self._ids.clear()
        self._wake()

    def fail(self, problem: Problem, finished: str | None = None) -> None:
        """Makes `next` raise `problem` from now on. `finished`: the id of the sequence that has ended with it."""
        if finished is not None:
            self._ids.pop(finished, None)
        self._problem = problem
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """The connection to rank 0. Call `start` first and `close` last, both on a running event loop.

    Attributes:
        model: Facts about the model in rank 0's last status.
        stats: Numbers in rank 0's last status.
        clock: Rank 0's clock at that status, in seconds.
        adapters: Ids of the adapters by name. None: there are no places for adapters.
        ranks: One map per rank while somebody watches (see `watch`).
    """

    def __init__(self, endpoint: str, stale_seconds: float = records.STALE_SECONDS):
        self.endpoint, self.stale_seconds = endpoint, stale_seconds
        self.model: dict[str, Any] = {}
        self.stats: dict[str, int | float | str] = {}
        self.ranks: list[dict[str, Any]] = []
        self.adapters: dict[str, int] | None = None
        self.clock = 0.0
        self.error: str | None = None
        self._reported = "loading"
        self._announced = "loading"
        self._heard_at: float | None = None
        self._lost: str | None = None
        self._generations: dict[str, Generation] = {}  # of the sequences that run or that accounts hold
        self._calls: dict[str, asyncio.Future[None]] = {}  # answers that `call` waits for
        self._drain_pending = False

    def start(self) -> None:
        """Connects to rank 0, which sends its status regularly from then on."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, ROUTING_ID)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # unlimited: at a limit the ROUTER would drop tokens
        self._socket.setsockopt(zmq.MAXMSGSIZE, records.MAX_MESSAGE_BYTES)
        self._socket.connect(self.endpoint)
        self._loop.add_reader(self._socket.fileno(), self._drain_socket)
        self._send(records.Hello())
        self._ticker = self._loop.call_soon(self._tick)

    def close(self) -> None:
        """Closes the connection. Unsent messages have 0.2 seconds to leave."""
        self._ticker.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    @property
    def state(self) -> str:
        """loading, ready, draining, failed, or stale: no message for `stale_seconds`."""
        if self._lost is not None:
            return "failed"
        if self._heard_at is not None and time.monotonic() - self._heard_at > self.stale_seconds:
            return "stale"
        return self._reported

    @property
    def active(self) -> int:
        """The number of sequences that were submitted and have not finished."""
        return len(self._generations)

    def unavailable(self) -> Problem | None:
        """Returns the reason why nothing can be submitted now, or None."""
        state = self.state
        if state == "ready":
            return None
        if self._lost is not None:
            return Problem(503, self._lost)
        reasons = {
            "loading": "the model is loading; try again soon",
            "draining": "the server is shutting down",
            "stale": f"the engine has given no sign of life for {self.stale_seconds:g} seconds",
            "failed": f"the engine has failed: {self.error or 'no reason given'}",
        }
        return Problem(503, reasons[state])

    def generation(self, account: Account | None = None) -> Generation:
        """Returns a new generation without sequences. The limits of `account` apply to it."""
        return Generation(self, account or Account())

    def watch(self) -> None:
        """Requests the ranks' counters for the next WATCH_SECONDS."""
        self._send(records.Watch())

    def drain(self) -> None:
        """Makes rank 0 finish the running sequences and refuse new ones."""
        self._drain_pending = not self._send(records.Drain())

    def end_early(self, reason: str) -> None:
        """Ends all requests with the tokens that they have; those without any token with 503 and `reason`."""
        for generation in set(self._generations.values()):
            generation.end_early(Problem(503, reason))

    def lose(self, reason: str) -> None:
        """Ends all requests with 503 and `reason`, and refuses new ones: rank 0 is gone, or this process ends."""
        self._lost = reason
        self._announce()

    def submit(self, generation: Generation, message: records.Submit | records.Embed) -> None:
        """Starts a sequence of `generation`.

        If the account is full, the sequence starts later. Raises Problem 503 if the engine accepts nothing.
        """
        problem = self.unavailable()
        if problem is not None:
            raise problem
        account = generation.account
        if account.is_full:
            account.held[message.id] = HeldMessage(message, self.send_held)
        elif self._send(message):
            account.running += 1
        else:
            raise Problem(503, f"the engine has not read the last {MAX_UNSENT} messages; try again later")
        self._generations[message.id] = generation

    async def call(self, message: records.LoadAdapter | records.UnloadAdapter) -> None:
        """Sends a message and waits until rank 0 has executed it. Raises Problem if rank 0 refuses."""
        if problem := self.unavailable():
            raise problem
        self._calls[message.id] = answer = asyncio.get_running_loop().create_future()
        try:
            if not self._send(message):
                raise Problem(503, f"the engine has not read the last {MAX_UNSENT} messages; try again later")
            await answer
        finally:
            self._calls.pop(message.id, None)

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence, if it has not ended."""
        generation = self._generations.get(sequence_id)
        if generation is None:
            return
        if sequence_id not in generation.account.held:
            self._send(records.Abort(sequence_id))
        self._end(sequence_id)

    def _end(self, sequence_id: str | None) -> Generation | None:
        """Removes a sequence, and starts the next ones that its account holds. Returns its generation, if any."""
        generation = None if sequence_id is None else self._generations.pop(sequence_id, None)
        if sequence_id is None or generation is None:
            return None
        account = generation.account
        if account.held.pop(sequence_id, None) is None:
            account.running -= 1
        while account.held and not account.is_full:
            held = account.next_held()
            held.send(account, held.message)
        return generation

    def send_held(self, account: Account, message: records.Submit | records.Embed) -> None:
        """Sends a message that `account` held."""
        account.running += 1
        if not self._send(message):
            problem = Problem(503, f"the engine has not read the last {MAX_UNSENT} messages; try again later")
            account.running -= 1
            self._generations.pop(message.id).fail(problem, message.id)

    def _send(self, message: records.ToRank0) -> bool:
        return self._send_together([message])

    def _send_together(self, group: Sequence[records.ToRank0]) -> bool:
        """Sends messages that rank 0 receives before its next step, all or none. Returns False if the queue is full."""
        try:
            self._socket.send_multipart([records.encode(message) for message in group], zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._loop.call_soon(self._drain_socket)  # sending may have consumed the descriptor's edge
        return True

    def _drain_socket(self) -> None:
        if self._socket.closed:
            return
        begun = time.monotonic()
        while time.monotonic() - begun < TURN_SECONDS:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(records.read(data, records.FROM_RANK_0))
            except Exception as error:  # unpacking raises many types; one bad message must not end the others
                log.error("a message from rank 0 is ignored: %s: %s", type(error).__name__, error)
        self._loop.call_soon(self._drain_socket)

    def _handle(self, message: records.FromRank0) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, records.Status):
            self._reported, self.error = message.state, message.error
            self.model, self.stats = message.model, message.stats
            self.ranks, self.adapters, self.clock = message.ranks, message.adapters, message.clock
            self._announce()
            return
        call = None if message.id is None else self._calls.pop(message.id, None)
        if call is not None or isinstance(message, records.Done):
            if call is not None and not call.done():
                if isinstance(message, records.Failure):
                    call.set_exception(_problem(message))
                else:
                    call.set_result(None)
            return
        if isinstance(message, records.Tokens) and message.finish_reason is None:
            generation = self._generations.get(message.id)
        else:
            generation = self._end(message.id)
        if generation is None:
            return  # it was aborted while this message was on its way
        if isinstance(message, records.Failure):
            generation.fail(_problem(message), message.id)
        else:
            generation.deliver(message)

    def _tick(self) -> None:
        self._drain_socket()  # first, since messages that arrived while the loop was busy are signs of life
        self._announce()
        if self._drain_pending:
            self.drain()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)

    def _announce(self) -> None:
        state, problem = self.state, self.unavailable()
        if state in ("failed", "stale") and problem is not None:
            for generation in set(self._generations.values()):
                generation.fail(problem)
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(problem)
        if state != self._announced:
            self._announced = state
            log.info("the engine is %s", state)


def new_id() -> str:
    """Returns an id for a message."""
    return secrets.token_hex(8)


def _problem(failure: records.Failure) -> Problem:
    status = failure.status if failure.status in (400, 404, 429, 503) else 500
    code = "model_not_found" if status == 404 else None
    return Problem(status, failure.message, failure.field, code)
