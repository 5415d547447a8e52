"""Decides which web pages may use the server, since a browser sends their requests without asking its user.

A page of another site can reach a server on 127.0.0.1 in two ways. Its own requests carry an Origin header, so those
that change or cost something are refused unless the origin is allowed. After DNS rebinding, requests carry the name of
the page's site as Host. So a server on loopback without API keys only answers to names of this machine. Clients other
than browsers send no Origin, and are not affected.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.responses import Response

from ckdist.serve.problems import Problem

ANY = "*"
DOCKER_HOST = "host.docker.internal"
JSON_TYPES = ("", "application/json")
CURL_TYPE = "application/x-www-form-urlencoded"  # default of `curl -d`, and of forms in web pages
PREFLIGHT_SECONDS = 600
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
ALLOWED_HEADERS = "authorization, content-type, x-api-key"


class Origins:
    """The rules for browsers. Names and values of headers are bytes, as in ASGI.

    Args:
        origins: Origins whose pages may use the server: scheme://host[:port], or * for all.
        hosts: Names that the server answers to, beyond this machine's own. None: any name.
    """

    def __init__(self, origins: tuple[str, ...], hosts: tuple[str, ...] | None):
        self.origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self.hosts = None if hosts is None else frozenset(host.lower() for host in hosts) | own_names()

    def refusal(self, method: str, headers: dict[bytes, bytes]) -> Problem | None:
        """Returns the reason to refuse a request, or None."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.hosts is not None and host and not self._answers_to(host):
            message = f"this server does not answer to the name {host[:200]!r}; --allowed-host adds a name"
            return Problem(403, message, code="host_not_allowed")
        if method not in ("POST", "PUT", "PATCH", "DELETE"):
            return None
        origin = headers.get(b"origin")
        shown = (origin or b"").decode("latin-1")
        is_own = shown.lower() in (f"http://{host}", f"https://{host}")
        if origin is not None and not is_own and not self._is_allowed(origin):
            message = f"web pages of {shown[:200]!r} may not use this server; --cors-origin allows them"
            return Problem(403, message, code="origin_not_allowed")
        site = headers.get(b"sec-fetch-site", b"none")
        if origin is None and site not in (b"none", b"same-origin"):
            message = "another site's web page may not use this server without naming its origin"
            return Problem(403, message, code="origin_not_allowed")
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
        if encoding.lower() not in ("", "identity"):
            message = f"the body has the encoding {encoding[:100]!r}: send it without Content-Encoding"
            return Problem(415, message, code="unsupported_encoding")
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        from_browser = origin is not None or b"sec-fetch-site" in headers
        if kind not in JSON_TYPES and (from_browser or kind != CURL_TYPE):
            message = f"the body must be JSON: send Content-Type: application/json, not {kind[:100]!r}"
            return Problem(415, message, code="unsupported_media_type")
        return None

    def headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Returns the headers of an answer that allow a page to read it."""
        origin = headers.get(b"origin")
        if origin is None or not self.origins:
            return []
        vary = [(b"vary", b"origin")]
        return [(b"access-control-allow-origin", origin), *vary] if self._is_allowed(origin) else vary

    def preflight(self, headers: dict[bytes, bytes]) -> Response:
        """Returns the answer to a preflight: a browser's question whether a page may send a request."""
        asked = headers.get(b"access-control-request-headers", ALLOWED_HEADERS.encode()).decode("latin-1")
        allowed = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": asked,
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        return Response(status_code=204, headers=allowed if self._is_allowed(headers[b"origin"]) else None)

    def _is_allowed(self, origin: bytes) -> bool:
        return ANY in self.origins or origin.decode("latin-1").lower() in self.origins

    def _answers_to(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if (self.hosts is not None and name in self.hosts) or name.endswith(".localhost"):
            return True
        try:  # DNS rebinding needs a name, so every address is allowed
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return False


def own_names() -> set[str]:
    """Returns this machine's names. Anybody on the network may answer for other names in .local or .internal."""
    name = socket.gethostname().lower()
    return {"localhost", name, f"{name.partition('.')[0]}.local", DOCKER_HOST}


def is_preflight(method: str, headers: dict[bytes, bytes]) -> bool:
    """True if the request is a browser's question before a page's own request."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers
