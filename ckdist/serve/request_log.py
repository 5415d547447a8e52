"""One log line per HTTP request: the client, the path, and the tokens and times of the answer."""

import json
import logging
import logging.handlers
import math
import re
import secrets
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckdist.serve.problems import Problem
from ckdist.serve.settings import LOG_FORMAT, HttpSettings

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
PROBES = (
    "/health",
    "/ping",
    "/livez",
    "/readyz",
    "/metrics",
)  # not logged if the status is 200 or 503, and always answered
MAX_PATH = 200
COMPLAINT_SECONDS = 60.0  # between two lines about a log that cannot be written
MAX_PROMPT_TOKENS = 4096  # maximum of a prompt in the log

log = logging.getLogger("ckdist.requests")


class Tokens(Protocol):
    """The engine's work on one request."""

    def log_fields(self) -> dict[str, int | float | str]:
        """Token counts and speeds by their names in the log."""
        ...

    def moments(self) -> tuple[float, ...]:
        """When its prompt was submitted, and when its first and its last token came, in seconds of time.monotonic.

        Empty if there is no token.
        """
        ...


@dataclass
class Request:
    """A request under way. `run` and `problem` are set by the functions below."""

    id: str
    client: str
    method: str
    path: str
    traceparent: str = ""  # W3C Trace Context, as the client sent it
    begun: float = field(default_factory=time.monotonic)
    run: Tokens | None = None
    problem: Problem | None = None
    prompt: str | None = None


_current: ContextVar[Request | None] = ContextVar("request", default=None)


def begin(scope: dict[str, Any], headers: dict[bytes, bytes]) -> Request:
    """Makes the record of the request in ASGI's `scope`, which is current in this task from now on.

    Its id is the client's `X-Request-Id` if that is a plain word, else a new one.
    """
    given = headers.get(b"x-request-id", b"")
    name = given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    address = (scope.get("client") or ("-",))[0]
    parent = headers.get(b"traceparent", b"")[:MAX_PATH].decode("latin-1")
    request = Request(name, address, scope["method"], scope["path"], parent)
    _current.set(request)
    return request


def note_run(run: Tokens, prompt: str | None = None) -> None:
    """Records that `run` answers the current request. `prompt`: its text, if prompts are logged."""
    if (request := _current.get()) is not None:
        request.run, request.prompt = run, prompt


def note_problem(problem: Problem) -> None:
    """Records that `problem` ends the current request."""
    if (request := _current.get()) is not None:
        request.problem = problem


def end(request: Request, status: int, key: str, model: str) -> None:
    """Writes the log line of the request."""
    if not log.isEnabledFor(logging.INFO) or (request.path in PROBES and status in (200, 503)):
        return
    fields: dict[str, Any] = {
        "request_id": request.id,
        "client": request.client,
        "key": key,
        "method": request.method,
        "path": request.path[:MAX_PATH],
        "status": status,
    }
    if request.run is not None:
        fields |= {"model": model, **request.run.log_fields()}
    if request.problem is not None:
        fields |= {"error": request.problem.code or request.problem.kind}
        if request.problem.field is not None:
            fields["field"] = request.problem.field[:MAX_PATH]
    fields["seconds"] = round(time.monotonic() - request.begun, 4)
    if request.prompt is not None:
        fields["prompt"] = request.prompt
    log.info("request", extra={"fields": fields})


class TextLines(logging.Formatter):
    """`time http LEVEL: message`; a request's fields follow as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        line = super().format(record)
        fields = getattr(record, "fields", {})
        return " ".join([line, *(f"{name}={_word(value)}" for name, value in fields.items())])


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LogFile(logging.handlers.WatchedFileHandler):
    """--log-file, opened again after a log rotation has moved it.

    While it cannot be written, its lines are lost, and standard error gets one line a minute.
    """

    _said = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line. Opening the file again may fail, too."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Says that the file cannot be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif time.monotonic() - self._said > COMPLAINT_SECONDS:
            self._said = time.monotonic()
            print(f"the log {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _word(value: Any) -> str:
    """A value as one word: texts that hold spaces, quotes or control characters are quoted."""
    text = str(value)
    return text if re.fullmatch(r"[!#-~]+", text) else json.dumps(text)


def start_logging(settings: HttpSettings) -> None:
    """Sends this process's log to standard error or --log-file."""
    if settings.log_file is None:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
    else:
        handler = LogFile(settings.log_file)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO if settings.verbose else logging.WARNING, handlers=[handler])
    log.setLevel(logging.WARNING if settings.no_log_requests else logging.INFO)
