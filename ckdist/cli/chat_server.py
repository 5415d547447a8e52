"""Answers from a server with the OpenAI API, streamed as server-sent events."""

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ckdist.config.chat_config import ChatConfig
from ckdist.config.sampling_config import SamplingConfig
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError, RequestError, one_line

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 600.0  # most seconds before an answer and between its pieces
MOST_ERROR_BYTES = 1 << 16


class ServerChat:
    """Requests answers over HTTP.

    Raises:
        EngineError: The server cannot be reached, or ends an answer with an error.
    """

    def __init__(self, config: ChatConfig) -> None:
        assert config.url is not None
        self._url = urllib.parse.urlsplit(config.url)
        self._headers = {"Content-Type": "application/json"}
        if config.api_key:
            self._headers["Authorization"] = f"Bearer {config.api_key}"
        self._fields = request_fields(config)
        connection, response = self._send("GET", "/models", None, CONNECT_SECONDS)
        try:
            self.name = str(json.loads(response.read(MOST_ERROR_BYTES))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise EngineError(f"{config.url} does not list its models: is it a server with the OpenAI API?") from None
        finally:
            connection.close()

    def answers(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yields the next answer in pieces. Raises RequestError if the server refuses the request."""
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._fields}
        connection, response = self._send("POST", "/chat/completions", json.dumps(body), SILENT_SECONDS)
        try:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield from piece_of(json.loads(data))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"the server's answer broke off: {error}") from None
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: str | None, seconds: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request and reads the head of its answer.

        Raises:
            RequestError: The answer is HTTP 4xx.
            EngineError: The server cannot be reached, or its answer is neither HTTP 200 nor 4xx.
        """
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        prefix = self._url.path.rstrip("/").removesuffix("/v1")
        try:
            connection = kind(self._url.hostname or "", self._url.port, timeout=CONNECT_SECONDS)
            connection.connect()
            connection.sock.settimeout(seconds)
            connection.request(method, f"{prefix}/v1{path}", body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            where = urllib.parse.urlunsplit(self._url)
            raise EngineError(f"{where} does not answer ({error}): is a server running there?") from None
        if response.status != http.client.OK:
            with_message = message_of(response.read(MOST_ERROR_BYTES))
            connection.close()
            refused = 400 <= response.status < 500
            raise (RequestError if refused else EngineError)(f"the server answers {response.status}: {with_message}")
        return connection, response


def request_fields(config: ChatConfig) -> dict[str, Any]:
    """Returns `max_tokens` and the fields that flags set. The server's own defaults hold for the rest."""
    known = {item.name for item in fields(SamplingParams)}
    defaults = {item.name: item.default for item in fields(SamplingConfig) if item.name in known}
    given = {
        name: list(value) if isinstance(value := getattr(config, name), tuple) else value
        for name, default in defaults.items()
        if getattr(config, name) != default
    }
    stop = {"stop": list(config.stop)} if config.stop else {}
    return {"max_tokens": config.n_predict, **given, **stop}


def piece_of(event: Any) -> Iterator[str]:
    """Yields the text of an event, if it has any. Raises EngineError if the event reports an error."""
    if isinstance(event, dict) and event.get("error"):
        raise EngineError(f"the server says: {message_of(json.dumps(event).encode())}")
    try:
        text = event["choices"][0]["delta"].get("content")
    except (LookupError, TypeError, AttributeError):
        return
    if text:
        yield str(text)


def message_of(body: bytes) -> str:
    """Returns the message of an error's body on one line."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return one_line(text, 500)
