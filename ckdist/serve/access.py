"""The outermost layer of the HTTP application: it admits or refuses requests, and counts them in the metrics."""

import time
from typing import Any, cast

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckdist.serve import request_log
from ckdist.serve.accounts import NO_KEY, Account, Accounts
from ckdist.serve.answer import problem_answer
from ckdist.serve.failed_keys import FailedKeys
from ckdist.serve.metrics import Metrics
from ckdist.serve.origins import Origins, is_preflight
from ckdist.serve.paths import page
from ckdist.serve.paths.absent import NAMES
from ckdist.serve.paths.path import PathNames
from ckdist.serve.problems import Problem
from ckdist.serve.settings import HttpSettings
from ckdist.serve.traces import Traces
from ckdist.serve.upload_form import FORM

OPEN_PATHS = ("/livez", "/readyz", "/health", "/ping", *(path.name for path in page.PATHS))
UPLOADS = ("/v1/files", "/v1/lora_uploads/{name:path}")
OUTSIDE = "/outside --api-prefix"


class Access:
    """Refuses requests that are not allowed, and passes all others to `app`.

    `names` are the paths with metrics of their own. All other paths are counted together, so that a stranger cannot
    fill memory with names.
    """

    def __init__(self, app: ASGIApp, settings: HttpSettings, accounts: Accounts, metrics: Metrics, names: PathNames):
        self.app, self.metrics, self.names = app, metrics, names
        self.model = settings.model_name
        self.accounts, self.failed_keys = accounts, FailedKeys()
        self.max_requests = settings.max_requests
        self.origins = Origins(settings.cors_origin, settings.allowed_hosts)
        self.under_way, self.prefix = 0, settings.api_prefix
        self.traces: Traces | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one HTTP request of ASGI. The server passes no other scopes."""
        begun, status = time.monotonic(), 499  # 499 if nothing is sent: then the client went away
        headers = dict(reversed(scope["headers"]))  # the first of repeated headers counts, but encodings add up
        headers[b"content-encoding"] = b", ".join(
            text for name, text in scope["headers"] if name == b"content-encoding"
        )
        request = request_log.begin(cast("dict[str, Any]", scope), headers)
        more = [*self.origins.headers(headers), (b"x-request-id", request.id.encode())]

        async def watch(message: Message) -> None:
            """Keeps the status, and adds the request's id and the headers for web pages."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if self.prefix:
            scope = {**scope, "path": self._below_prefix(scope["path"]), "root_path": self.prefix}
        known, path = self.names.resolve(scope["path"]) or (scope["path"], "other")
        account, problem = self._account(scope, path, headers)
        scope["ckdist.key"] = NO_KEY if account is None else account.name
        scope = {**scope, "path": known, "ckdist.account": account}
        answer = self._answer(scope, path, headers, problem)
        counted = (self, account) if account is not None else (self,)
        for counter in counted:
            counter.under_way += 1
        try:
            await (answer or self.app)(scope, receive, watch)
        finally:
            for counter in counted:
                counter.under_way -= 1
            if self.traces is not None:
                self.traces.add(request, status)
            request_log.end(request, status, scope.get("ckdist.key", "-"), scope.get("ckdist.model", self.model))
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.request_seconds.labels(path).observe(time.monotonic() - begun)

    def _below_prefix(self, path: str) -> str:
        """Returns a path without --api-prefix. A path outside it becomes one that the application lacks."""
        if path == self.prefix or path.startswith(f"{self.prefix}/"):
            return path[len(self.prefix) :] or "/"
        return f"{OUTSIDE}{path}"

    def _answer(self, scope: Scope, path: str, headers: dict[bytes, bytes], no_key: Problem | None) -> Response | None:
        """Returns the answer to a refused request or to a preflight; None for requests that `app` handles.

        Args:
            path: The path's name in the table.
            no_key: The reason why the client may not come in, or None.
        """
        method, known = scope["method"], scope["path"]
        if path == "other" and known.startswith(OUTSIDE):
            return problem_answer(Problem(404, f"all paths begin with {self.prefix}", code="unknown_url"), known)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy in front may use the other of the two, and take a part of the body for a new request.
            problem = Problem(400, "Content-Length and Transfer-Encoding contradict one another; send one of them")
            return problem_answer(problem, known, {"Connection": "close"})
        if is_preflight(method, headers):
            return self.origins.preflight(headers)
        problem = self.origins.refusal(method, headers)
        is_form = path in UPLOADS and headers.get(b"content-type", b"").startswith(FORM.encode())
        is_other_type = problem is not None and problem.code == "unsupported_media_type"
        if is_other_type and (path in NAMES or is_form):
            problem = None  # a path that does not exist is answered as such; files are uploaded as forms
        problem = problem or no_key
        if problem is None and path not in request_log.PROBES:
            problem = self._overload(scope["ckdist.account"])
        return None if problem is None else problem_answer(problem, known)

    def _overload(self, account: Account | None) -> Problem | None:
        """Returns the refusal of one more request if too many are under way, of all clients or of this one."""
        if self.under_way >= self.max_requests:
            message = f"{self.under_way} requests are under way, of at most {self.max_requests}; try again later"
            return Problem(429, message)
        try:
            if account is not None:
                account.check_requests(self.max_requests, self.under_way)
        except Problem as problem:
            return problem
        return None

    def _account(self, scope: Scope, path: str, headers: dict[bytes, bytes]) -> tuple[Account | None, Problem | None]:
        """Returns the account of the request's key, or the refusal. Both may be None on a path that needs no key."""
        host = (scope.get("client") or ("",))[0]
        if not self.accounts.ask_for_key:
            return self.accounts.at_address(host), None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b"")] + [key.strip()] * (kind.lower() == b"bearer")
        given = [key for key in keys if key]
        account = self.accounts.find(given)
        if path in OPEN_PATHS or is_preflight(scope["method"], headers):
            return account, None
        wait = self.failed_keys.wait_seconds(host) if given else 0
        if account is not None and (not wait or self.failed_keys.has_accepted(host, account.name)):
            self.failed_keys.accept(host, account.name)
            return account, None
        if account is None and given:
            self.metrics.failed_keys.inc()
        if wait:
            message = f"too many wrong API keys came from this address; try again in {wait} s"
            return None, Problem(429, message, retry_after=wait)
        if given:
            self.failed_keys.add(host)
        message = "a valid API key is needed: send 'Authorization: Bearer KEY'"
        return None, Problem(401, message, code="invalid_api_key")
