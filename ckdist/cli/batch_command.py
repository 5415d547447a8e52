"""`ckdist batch`: rank 0 serves on a port that only this process knows, and threads send it the lines of a file."""

import dataclasses
import http.client
import json
import os
import pathlib
import queue
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ckdist.cli.frozen_import import frozen_import
from ckdist.cli.serve_ranks import host_cpus, work
from ckdist.cli.server_start import model_name, open_listeners
from ckdist.comm.agreement import start_ranks
from ckdist.comm.world import together
from ckdist.config.batch_config import BatchConfig
from ckdist.config.engine_config import EngineConfig
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import CkdistError, ConfigError, EngineError
from ckdist.progress import ProgressBar
from ckdist.regular_file import open_regular
from ckdist.serve.api_keys import VARIABLE
from ckdist.serve.batch_lines import Line, body_at, in_order, read_lines
from ckdist.serve.batch_output import BatchOutput

MAX_LINES = 10_000_000
RETRY_SECONDS = 0.2
RETRIES_SECONDS = 600.0  # in which a line may be refused for want of room
SILENT_SECONDS = 86400.0  # a long answer is one piece
BUSY = (429, 503)


def run(config: BatchConfig) -> int:
    """Answers the lines that have no result yet. Returns 0 if all have an answer, 1 if some have an error."""
    parent = os.getppid()
    world = start_ranks(config)
    batch = together(world, lambda: Batch(config) if world.rank == 0 else None)
    left = world.gather(0 if batch is None else len(batch.left))[0]
    if config.check or not left:
        world.close()
        return 0 if batch is None else batch.report()
    served, key = serve_config(config), secrets.token_urlsafe(32)
    os.environ[VARIABLE] = key  # nobody else may use the port
    rank_0 = frozen_import("ckdist.cli.serve_rank_0") if world.rank == 0 else None
    listeners = together(world, lambda: open_listeners(served) if rank_0 else None)
    cpus = host_cpus(world)
    if served.model is not None:
        from ckdist.hub.resolve import resolve

        served = dataclasses.replace(served, model=resolve(served.model, world))
    if rank_0 is None or batch is None:
        work(served, world)
        return 0
    name = model_name(config)
    rank_0.serve(served, world, listeners, name, cpus, parent, lambda url, end: batch.start(url, key, end))
    return batch.report()


def serve_config(config: BatchConfig) -> ServeConfig:
    """Returns the settings of the server that answers the lines."""
    shared = {item.name: getattr(config, item.name) for item in dataclasses.fields(EngineConfig)}
    return ServeConfig(
        **shared, port=0, no_webui=True, no_log_requests=True, max_queue=4 * config.parallel,
        max_tokens_default=config.max_tokens_default, pooling=config.pooling, max_step_ms=0.0,
    )  # fmt: skip


class Batch:
    """The lines, their results, and the threads that bring them together."""

    def __init__(self, config: BatchConfig):
        """Raises ConfigError for unreadable files, and RequestError for wrong lines."""
        assert config.input is not None
        self.config, self._threads = config, list[threading.Thread]()
        self._held, self._failure = ExitStack(), None
        self._begun = time.monotonic()
        self._tokens = [0, 0]  # of prompts and of answers
        self._count_lock = threading.Lock()
        try:
            with open_regular(config.input) as file:
                self.lines = read_lines(file, config.input, MAX_LINES, config.strict_fields, config.endpoint)
        except OSError as error:
            raise ConfigError(f"-i {config.input} cannot be read: {error.strerror}") from None
        self.left, self.output, self.rows = self.lines, None, None
        if not config.check:
            self._open_output()

    def start(self, url: str, key: str, end: Callable[[], None]) -> None:
        """Starts the threads. `end` is called once all lines have a result, or one cannot be written."""
        self._url, self._key, self._end = urllib.parse.urlsplit(url), key, end
        self._queue: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        for line in in_order(self.left):
            self._queue.put(line)
        count = min(2 * self.config.parallel, len(self.left))
        self._running, self._begun = count, time.monotonic()
        self._bar = self._held.enter_context(
            ProgressBar(len(self.lines), "line", "batch", start=len(self.lines) - len(self.left))
        )
        for number in range(count):
            self._queue.put(None)
            self._threads.append(threading.Thread(target=self._work, name=f"batch-{number}", daemon=True))
        for thread in self._threads:
            thread.start()

    def report(self) -> int:
        """Closes the files, prints a line and returns the exit code. Raises EngineError if results are missing."""
        for thread in self._threads:
            thread.join(RETRY_SECONDS)
        self._held.close()
        if self.output is None:
            print(f"{len(self.lines)} lines are right")
            return 0
        done, answers = len(self.output.done), sum(self.output.done.values())
        if self._failure is not None or done < len(self.lines):
            why = self._failure or "the server has stopped"
            remedy = "; the same command continues"
            raise EngineError(f"the batch has stopped at {done} of {len(self.lines)} results: {why}{remedy}")
        seconds = max(1e-9, time.monotonic() - self._begun)
        prompt, made = self._tokens
        speed = (
            f", {prompt} prompt tokens and {made} generated ones, {made / seconds:.1f} a second" if self.left else ""
        )
        failed = done - answers
        errors = f", {failed} errors in {self._errors_path()}" if failed else ""
        print(f"{answers} answers in {self.config.output}{errors}{speed}")
        return 1 if failed else 0

    def _open_output(self) -> None:
        config = self.config
        assert config.output is not None
        try:
            self.output = self._held.enter_context(BatchOutput(pathlib.Path(config.output), self._errors_path()))
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
        known = {line.custom_id for line in self.lines}
        if strangers := [name for name in self.output.done if name not in known]:
            example = f"such as {strangers[0][:64]!r}"
            raise ConfigError(
                f"{config.output} has {len(strangers)} results of other requests, {example}: choose another file"
            )
        self.left = [line for line in self.lines if line.custom_id not in self.output.done]
        if config.logprobs is not None:
            from ckdist.serve.logprob_rows import LogprobRows

            self.rows = LogprobRows(pathlib.Path(f"{config.output}.logprobs"), config.logprobs, self.output.last_rows)
            self._held.callback(self.rows.close)

    def _errors_path(self) -> pathlib.Path:
        output = pathlib.Path(str(self.config.output))
        return pathlib.Path(self.config.errors or output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}"))

    # threads

    def _work(self) -> None:
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=SILENT_SECONDS)
        try:
            with open_regular(str(self.config.input)) as file:
                while self._failure is None and (line := self._queue.get()) is not None:
                    self._answer(connection, line, body_at(file, line))
        except OSError as error:
            self._failure = self._failure or (error.strerror or str(error))
        except (CkdistError, http.client.HTTPException) as error:
            self._failure = self._failure or str(error)
        finally:
            connection.close()
            with self._count_lock:
                self._running -= 1
                if not self._running:
                    self._end()

    def _answer(self, connection: http.client.HTTPConnection, line: Line, body: dict[str, Any]) -> None:
        assert self.output is not None
        data = json.dumps(self._sent(line, body))
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        end = time.monotonic() + RETRIES_SECONDS
        while True:
            connection.request("POST", line.url, data, headers)
            response = connection.getresponse()
            answer, request_id = json.loads(response.read()), response.headers.get("x-request-id", "")
            if response.status not in BUSY or time.monotonic() > end:
                break
            time.sleep(RETRY_SECONDS)
        if response.status in BUSY or (response.status >= 500 and "error" not in answer):
            raise EngineError(f"the server answers {response.status}: {str(answer)[:200]}")
        if response.status == 200 and self.rows is not None:
            self.rows.take(answer)
        self.output.add(line.custom_id, response.status, request_id, answer)
        usage = answer.get("usage") or {}
        with self._count_lock:
            self._tokens[0] += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self._tokens[1] += usage.get("completion_tokens") or usage.get("output_tokens") or 0
            self._bar.update(1)

    def _sent(self, line: Line, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body, with the fields for --logprobs."""
        if self.config.logprobs is None or line.url not in ("/v1/chat/completions", "/v1/completions"):
            return body
        k = self.config.logprobs
        scores = {"logprobs": True, "top_logprobs": k} if line.url == "/v1/chat/completions" else {"logprobs": k}
        return {**body, **scores, "return_tokens_as_token_ids": True}
