"""Answers from a server with the OpenAI API, streamed as server-sent events."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ckdist.cli.server_call import CONNECT_SECONDS, body_of, call, message_of
from ckdist.config.chat_config import ChatConfig
from ckdist.config.sampling_config import SamplingConfig
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError

SILENT_SECONDS = 600.0  # most seconds before an answer and between its pieces


class ServerChat:
    """Requests answers over HTTP.

    Raises:
        EngineError: The server cannot be reached, or ends an answer with an error.
    """

    def __init__(self, config: ChatConfig) -> None:
        assert config.url is not None
        self._url = config.url
        self._headers = {"Content-Type": "application/json"}
        if config.api_key:
            self._headers["Authorization"] = f"Bearer {config.api_key}"
        self._fields = request_fields(config)
        listed = body_of(self._url, *call(self._url, "GET", "/models", self._headers, CONNECT_SECONDS))
        try:
            self.name = str(json.loads(listed)["data"][0]["id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise EngineError(f"{config.url} does not list its models: is it a server with the OpenAI API?") from None

    def answers(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yields the next answer in pieces. Raises RequestError if the server refuses the request."""
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._fields}
        connection, response = call(
            self._url, "POST", "/chat/completions", self._headers, SILENT_SECONDS, json.dumps(body)
        )
        try:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield from piece_of(json.loads(data))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise EngineError(f"the server's answer broke off: {error}") from None
        finally:
            connection.close()


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
        yield str(text).encode(errors="replace").decode()  # half of a character, which no terminal takes
