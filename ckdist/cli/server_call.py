"""One request to a server with the OpenAI API, for the commands that are its clients."""

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Iterable, Mapping

from ckdist.errors import EngineError, RequestError, one_line

CONNECT_SECONDS = 10.0
MOST_BODY_BYTES = 1 << 16


def call(
    url: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    seconds: float,
    body: str | Iterable[bytes] | None = None,
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Sends a request and reads the head of its answer.

    Args:
        url: The server's, with or without /v1 at its end.
        path: The path after /v1.
        seconds: Longest silence before the answer and between its pieces.

    Raises:
        RequestError: The answer is HTTP 4xx.
        EngineError: The server cannot be reached, or its answer is neither HTTP 200 nor 4xx.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a refusal may come before the body's end
            connection.request(method, f"{prefix}/v1{path}", body, dict(headers))
        response = connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineError(f"{url} does not answer ({error}): is a server running there?") from None
    if response.status != http.client.OK:
        with_message = message_of(body_of(url, connection, response))
        refused = 400 <= response.status < 500
        raise (RequestError if refused else EngineError)(f"the server answers {response.status}: {with_message}")
    return connection, response


def body_of(url: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> bytes:
    """Returns up to MOST_BODY_BYTES of an answer, and closes its connection. Raises EngineError if it breaks off."""
    try:
        return response.read(MOST_BODY_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"the answer of {url} broke off: {one_line(error)}") from None
    finally:
        connection.close()


def message_of(body: bytes) -> str:
    """Returns the message of an error's body on one line."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        text = body.decode(errors="replace")
    return one_line(text, 500)
