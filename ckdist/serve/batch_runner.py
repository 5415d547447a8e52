"""Runs the batches of --batch-dir, the oldest first. Live requests come before them.

Each line goes through the paths of the application, as a request of its owner. Its result is in a file before the next
status of the batch. After a restart the lines without a result are run.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from ckdist.errors import CkdistError, RequestError
from ckdist.serve.accounts import Account, Accounts
from ckdist.serve.batch_lines import BadLinesError, Line, body_at, in_order, read_lines
from ckdist.serve.batch_output import BatchOutput
from ckdist.serve.batch_store import MAX_LINES, BatchStore
from ckdist.serve.body import receive_again, receive_nothing
from ckdist.serve.encoding import to_json
from ckdist.serve.problems import Problem
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.settings import HttpSettings

IDLE_SECONDS = 0.5
BUSY_SECONDS = 0.5  # after a 429 or 503, before a line is tried again
REFUSED_SECONDS = 600.0  # in which a model cannot load, before its 503 is a line's result
FULL_SECONDS = 10.0  # after which a batch is tried again whose end could not be written
BATCH = "ckdist.batch"  # in the scope of a line's request
ROOM_LINES = 64  # between two looks at the room in the folder
LINE_BYTES = 1 << 20  # that must be free
BUSY = (429, 503)

log = logging.getLogger(__name__)


class BatchHost(Protocol):
    """The server that answers the lines: one model's service, or the router."""

    settings: HttpSettings
    accounts: Accounts
    draining: bool

    @property
    def has_started(self) -> bool:
        """True if lines can run."""
        ...

    @property
    def is_crowded(self) -> bool:
        """True if a model's load waits until another model has no requests. No further lines begin."""
        ...

    def check_model(self, body: dict[str, Any]) -> None:
        """Raises Problem or RequestError for a line that names an unknown model or adapter."""
        ...

    def cannot_load(self, name: Any) -> bool:
        """True if the model of this name has failed to load."""
        ...


def open_batches(host: BatchHost, app: ASGIApp, settings: HttpSettings) -> "BatchRunner | None":
    """Begins to run the batches of --batch-dir. Raises ConfigError if the folder cannot be used."""
    if settings.batch_folder is None:
        return None
    return BatchRunner(host, app, BatchStore(settings.batch_folder, settings.batch_bytes))


class BatchRunner:
    """Runs batches from its construction, on a running event loop, until `close`."""

    def __init__(self, host: BatchHost, app: ASGIApp, store: BatchStore):
        self._host, self._app, self.store = host, app, store
        self._outputs: dict[str, BatchOutput] = {}  # of running batches
        self._task = asyncio.create_task(self._run_all())

    async def close(self) -> None:
        """Ends running lines, which the next server runs again."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.store.close()

    async def _run_all(self) -> None:
        while True:
            batch = next(iter(self.store.unfinished()), None)
            if batch is None or not self._host.has_started or self._host.draining:
                await asyncio.sleep(IDLE_SECONDS)
                continue
            try:
                await self._run(batch)
            except asyncio.CancelledError:
                raise
            except (CkdistError, OSError) as error:
                await self._fail_or_wait(batch, str(error))
            except Exception as error:
                log.exception("batch %s has failed", batch["id"])
                await self._fail_or_wait(batch, f"internal error: {type(error).__name__}")

    def counts(self, batch: dict[str, Any]) -> tuple[int, int, int]:
        """Returns the numbers of lines of a batch: all, answered and failed."""
        output = self._outputs.get(batch["id"])
        if output is None:
            return batch.get("total", 0), batch.get("completed", 0), batch.get("failed", 0)
        answered = sum(output.done.values())
        return batch.get("total", 0), answered, len(output.done) - answered

    async def _run(self, batch: dict[str, Any]) -> None:
        store, batch_id = self.store, batch["id"]
        account = self._account(batch["owner"])
        source = store.path(batch["input_file_id"])
        strict = self._host.settings.strict_fields
        with source.open("rb") as file:
            try:
                begins = batch["status"] == "validating"  # later, adapters may be gone
                more = batch.get("endpoint"), self._host.check_model if begins and batch["face"] == "openai" else None
                lines = await asyncio.to_thread(read_lines, file, "the input", MAX_LINES, strict, *more)
            except BadLinesError as error:
                shown = error.lines[:1000]
                errors = [{"line": bad.number, "message": bad.reason, "code": "invalid_line"} for bad in shown]
                store.change(batch_id, "failed", failed_at=int(time.time()), errors=errors)
                return
            if begins:
                batch = store.change(batch_id, "in_progress", in_progress_at=int(time.time()), total=len(lines))
            answers, errors = (store.results(batch_id, kind) for kind in ("answers", "errors"))
            with BatchOutput(answers, errors) as output:
                self._outputs[batch_id] = output
                try:
                    left = [line for line in lines if line.custom_id not in output.done]
                    await self._run_lines(batch, file, in_order(left), account, output)
                    self._end(batch_id, lines, output)
                finally:
                    del self._outputs[batch_id]

    async def _run_lines(
        self, batch: dict[str, Any], file: Any, lines: Iterator[Line], account: Account, output: BatchOutput
    ) -> None:
        """Runs lines until all have run or the batch is to end. One more runs at once than sequences decode."""
        running: set[asyncio.Task[None]] = set()
        number, exhausted = 0, False
        try:
            while running or not exhausted:
                room = 0 if running and self._host.is_crowded else self._host.settings.parallel + 1
                while not exhausted and len(running) < room:
                    line = None if self._shall_end(batch["id"]) else next(lines, None)
                    if line is None:
                        exhausted = True
                        break
                    if number % ROOM_LINES == 0:
                        self.store.check_room(LINE_BYTES)
                    number += 1
                    running.add(asyncio.create_task(self._run_line(line, body_at(file, line), account, output)))
                if not running:
                    break
                done, running = await asyncio.wait(running, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if self._host.draining:
                    raise asyncio.CancelledError
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def _shall_end(self, batch_id: str) -> bool:
        now = self._now(batch_id)
        return now is None or now["status"] == "cancelling" or time.time() > now["expires_at"]

    async def _run_line(self, line: Line, body: dict[str, Any], account: Account, output: BatchOutput) -> None:
        data = to_json({**body, "service_tier": "batch"})
        end = math.inf
        while True:
            status, request_id, answer = await self.call(line.url, data, account)
            now = time.monotonic()
            if status not in BUSY or now > end:
                break
            end = min(end, now + REFUSED_SECONDS) if self._host.cannot_load(body.get("model")) else math.inf
            await asyncio.sleep(BUSY_SECONDS)
        output.add(line.custom_id, status, request_id, answer)

    async def call(self, path: str, body: bytes, account: Account) -> tuple[int, str, Any]:
        """Returns the status, an id and the JSON of the application's answer to a request of `account`."""
        parts, status = list[bytes](), 500

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "headers": headers, "client": None, "server": None,
            "ckdist.account": account, "ckdist.key": account.name, BATCH: True,
        }  # fmt: skip
        await self._app(scope, receive_again(body, receive_nothing), send)
        try:
            answer = parse_object(b"".join(parts))
        except Problem:
            answer = {"error": {"message": "the answer is no JSON"}}
        return status, f"req_{time.time_ns():x}", answer

    def _end(self, batch_id: str, lines: list[Line], output: BatchOutput) -> None:
        """Ends a batch: lines that did not run are errors, and both outputs become files."""
        store, now = self.store, int(time.time())
        batch = self._now(batch_id)
        if batch is None:
            return
        left = [line for line in lines if line.custom_id not in output.done]
        cancelled = batch["status"] == "cancelling"
        code = "batch_cancelled" if cancelled else "batch_expired"
        text = "the batch was cancelled" if cancelled else "the batch has expired"
        for line in left:
            output.add(line.custom_id, 0, "", None, {"code": code, "message": f"{text} before this request ran"})
        answered = sum(output.done.values())
        counts = {"completed": answered, "failed": len(output.done) - answered, "unrun": len(left)}
        output.close()
        files = self._files(batch)
        status = "completed" if not left else "cancelled" if cancelled else "expired"
        store.change(batch_id, status, **{f"{status}_at": now}, finalizing_at=now, **counts, **files)
        log.warning("batch %s is %s: %d answers, %d errors", batch_id, status, counts["completed"], counts["failed"])

    async def _fail_or_wait(self, batch: dict[str, Any], why: str) -> None:
        """Ends a batch that cannot go on; its results stay. If the disk has no room for that, it is tried again later."""
        log.error("batch %s has failed: %s", batch["id"], why)
        errors = [{"line": None, "message": why, "code": "failed"}]
        try:
            self.store.change(batch["id"], "failed", failed_at=int(time.time()), errors=errors, **self._files(batch))
        except (CkdistError, OSError) as error:
            log.error("batch %s waits for room: %s", batch["id"], error)
            await asyncio.sleep(FULL_SECONDS)

    def _now(self, batch_id: str) -> dict[str, Any] | None:
        """Returns the batch as it is now; None if it has ended."""
        return next((batch for batch in self.store.unfinished() if batch["id"] == batch_id), None)

    def _files(self, batch: dict[str, Any]) -> dict[str, str]:
        """Makes files of the outputs. Returns their ids. An empty output is removed."""
        files: dict[str, str] = {}
        for kind, name in (("answers", "output_file_id"), ("errors", "error_file_id")):
            path, filename = self.store.results(batch["id"], kind), f"{batch['id']}_{kind}.jsonl"
            if path.exists() and path.stat().st_size:
                files[name] = self.store.add_file(batch["owner"], path, "batch_output", filename)["id"]
            else:
                path.unlink(missing_ok=True)
        return files

    def _account(self, owner: str) -> Account:
        """Raises RequestError if the owner's key is gone."""
        accounts = self._host.accounts
        if not accounts.ask_for_key:
            return Account(address="batch")
        account = accounts.named(owner)
        if account is None:
            raise RequestError(f"the key {owner!r} of the batch is gone")
        return account
