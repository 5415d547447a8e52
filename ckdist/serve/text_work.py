"""Prepares requests in worker processes with limits, so that no text or template blocks the event loop.

A zygote loads the model's tokenizer and forks workers, which take one request at a time. If a worker exceeds a limit,
the kernel kills it: its request gets a 400, and a new worker replaces it. Few requests with long bodies run at once,
and few with grammars, so that others never wait for all of them.
"""

import asyncio
import contextlib
import logging
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import astuple
from typing import Any

from msgspec import structs

from ckdist.errors import EngineError
from ckdist.serve import text_records as records
from ckdist.serve.accounts import part_of
from ckdist.serve.encoding import Turns
from ckdist.serve.problems import Problem
from ckdist.serve.settings import LOG_FORMAT
from ckdist.tokens import worker_frames
from ckdist.tokens.confined import Overrides, Zygote
from ckdist.tokens.process_limits import Limits
from ckdist.tokens.vocabulary import Vocabulary

HANDLER = "ckdist.serve.requests.task:run"
WORKERS = 8  # they share the zygote's memory; enough remain if some are stuck until they are killed
LONG_AT_ONCE = 2
STRUCTURED_AT_ONCE = 4
# Matches bodies with a grammar or schema to check. A text that matches by chance only waits in their lane.
STRUCTURED = re.compile(rb'"(?:guided_|grammar"|json_schema"|response_format"|structured_outputs"|format"|tools")')
LONG = 256 << 10  # bytes of a body that goes to the lane of long ones
PART_BYTES = 256 << 10
MAX_WAITING = 256  # short bodies
MAX_WAITING_LONG = 8
CPU_SECONDS, CPU_SECONDS_PER_MB = 0.25, 1.5  # a chat takes 1 ms, a MB of text 0.6 s
MEMORY, MEMORY_PER_BYTE = 256 << 20, 320
KILLING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # no limit sends these
GRACE_SECONDS = 2.0  # after a worker's own time limit, until this process kills it

log = logging.getLogger(__name__)


class Worker:
    """One worker process, seen from this process. `zygote` forks it; a later zygote uses its number again."""

    def __init__(self, zygote: Zygote):
        self.zygote = zygote
        self.number, self.connection = zygote.fork()
        self.connection.setblocking(False)

    async def ask(self, head: dict[str, Any], body: bytes) -> tuple[records.Answer, list[bytes]]:
        """Sends a request. Returns the answer, and its body in parts.

        Raises EOFError or OSError if the worker ends before it has answered, EngineError if the answer is not valid.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, worker_frames.pack(head, len(body)))
        if body:
            await loop.sock_sendall(self.connection, body)
        head_size, body_size = worker_frames.SIZES.unpack(await self._receive(worker_frames.SIZES.size))
        if head_size + body_size > 2 * records.MAX_ANSWER:
            raise EOFError(f"an answer of {head_size + body_size} bytes")
        answer = records.read_answer(await self._receive(head_size))
        return answer, [part async for part in self._parts(body_size)]

    async def _receive(self, size: int) -> bytes:
        return b"".join([part async for part in self._parts(size)])

    async def _parts(self, size: int) -> AsyncIterator[bytes]:
        loop, turns = asyncio.get_running_loop(), Turns()
        while size:
            part = await loop.sock_recv(self.connection, min(size, PART_BYTES))
            if not part:
                raise EOFError("the worker has ended")
            size -= len(part)
            yield part
            await turns.end()


class Lane:
    """Requests of one size class: `at_once` of them have a worker, and `most_waiting` may wait for one."""

    def __init__(self, at_once: int, most_waiting: int):
        self.turn, self.most_waiting = asyncio.Semaphore(at_once), most_waiting
        self._waiting = Counter[str]()  # requests by client

    async def wait(self, client: str) -> None:
        """Waits for a turn. Raises Problem 429 if too many requests wait, of all clients or of this one."""
        total, own = self._waiting.total(), self._waiting[client]
        if total >= self.most_waiting or own >= part_of(self.most_waiting, total - own):
            told = f"{total} requests wait to be tokenised, {own} of them of this client"
            raise Problem(429, f"{told}, of at most {self.most_waiting}; try again later")
        self._waiting[client] += 1
        try:
            await self.turn.acquire()
        finally:
            self._waiting -= Counter([client])  # drops clients without requests


class TextWork:
    """Prepares requests with one model's tokenizer. Call `start` first (and after it has `ended`), `close` last."""

    def __init__(self, model: str, overrides: Overrides = None):
        self.model, self.overrides = model, overrides
        self._zygote: Zygote | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._asking = asyncio.Lock()

    @property
    def ended(self) -> bool:
        """True if the process with the tokenizer has ended, and with it all workers."""
        return self._zygote is not None and self._zygote.process.poll() is not None

    async def start(self) -> Vocabulary:
        """Starts the workers and returns the model's vocabulary.

        Raises ModelFileError if the tokenizer does not load within limits.
        """
        self._zygote = Zygote(self.model, self.overrides, HANDLER, log_format=LOG_FORMAT)
        vocabulary = await asyncio.to_thread(self._zygote.load)
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()  # the last one used has the warmest caches
        self._short, self._long = Lane(WORKERS, MAX_WAITING), Lane(LONG_AT_ONCE, MAX_WAITING_LONG)
        self._structured = Lane(STRUCTURED_AT_ONCE, MAX_WAITING)
        for _ in range(WORKERS):
            self._fork()
        return vocabulary

    def close(self) -> None:
        """Cancels running requests and ends the processes."""
        for task in self._running:
            task.cancel()
        if self._zygote is not None:
            self._zygote.close()

    async def prepare(
        self, kind: str, body: bytes, facts: records.ModelFacts, client: str
    ) -> records.Prepared | records.EmbeddingWork | list[bytes]:
        """Runs `ckdist.serve.requests.prepare.prepare` in a worker. A finished answer is JSON in parts.

        Raises that function's errors as Problem, and Problem 429 if too many requests wait. If the caller is cancelled,
        work that has not begun is dropped, and work on a long body is killed.
        """
        lane = self._long if len(body) > LONG else self._structured if STRUCTURED.search(body) else self._short
        await lane.wait(client)
        try:
            worker = await self._idle.get()
        except BaseException:
            lane.turn.release()
            raise
        task = asyncio.create_task(self._work(worker, lane, kind, body, facts))
        self._running.add(task)
        task.add_done_callback(self._finished)
        try:
            answer, content = await asyncio.shield(task)
        except asyncio.CancelledError:
            if lane is self._long:
                worker.zygote.kill(worker.number)
            raise
        if isinstance(answer, records.Refusal):
            raise Problem(**structs.asdict(answer))
        if isinstance(answer, records.WorkerFault):
            raise EngineError(f"a text worker has failed: {answer.message}")
        return content if isinstance(answer, records.JsonAnswer) else answer

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio logs an exception that nobody reads, and an aborted request has no caller

    async def _work(
        self, worker: Worker, lane: Lane, kind: str, body: bytes, facts: records.ModelFacts
    ) -> tuple[records.Answer, list[bytes]]:
        limits = Limits(CPU_SECONDS + CPU_SECONDS_PER_MB * len(body) / 1e6, MEMORY + MEMORY_PER_BYTE * len(body))
        head = {"limits": astuple(limits), "task": records.Task(kind, facts)}
        stays = False
        try:
            answer = await asyncio.wait_for(worker.ask(head, body), limits.wall + GRACE_SECONDS)
            stays = lane is not self._long  # a long body has grown the worker's memory
            return answer
        except (EOFError, OSError, asyncio.TimeoutError) as error:
            if not isinstance(error, asyncio.TimeoutError) and await self._was_killed(worker):
                raise Problem(503, "the process that prepared the request was killed; try again") from None
            log.warning("a text worker was ended by its limits (%s, %d bytes)", kind, len(body))
            return records.Refusal(**vars(records.too_much(kind))), []
        finally:
            if stays:
                self._idle.put_nowait(worker)
            else:
                worker.zygote.kill(worker.number)
                worker.connection.close()
                if worker.zygote is self._zygote:
                    self._fork()
            lane.turn.release()

    async def _was_killed(self, worker: Worker) -> bool:
        """True if a signal from outside has ended the worker, or all workers, and not one of its limits."""
        async with self._asking:
            number = await asyncio.to_thread(worker.zygote.signal_of, worker.number)
        return number is None or number in KILLING

    def _fork(self) -> None:
        with contextlib.suppress(EngineError):  # `ended` is true then
            assert self._zygote is not None, "`start` comes before requests"
            self._idle.put_nowait(Worker(self._zygote))
