"""Reads the items of requests whose items are kept: /v1/responses and /v1/conversations."""

import json
import secrets
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.responses import History
from ckdist.serve.text_records import ModelFacts

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def named_items(given: str | list[Any]) -> list[tuple[str, bytes]]:
    """Returns the items of an input as JSON, with their ids. Those without an id get one."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [_named(item) for item in given]


def _named(item: dict[str, Any]) -> tuple[str, bytes]:
    kind = item.get("type") or "message"
    name = item.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_KEY:
        name = f"{PREFIXES.get(str(kind), 'item')}_{secrets.token_hex(12)}"
    whole = {"status": "completed", **item, "type": kind, "id": name}
    return name, json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def response_links(body: dict[str, Any], _tokenizer: object, _facts: ModelFacts) -> dict[str, Any]:
    """Returns the `previous_response_id` and the id of the `conversation` in a body of /v1/responses."""
    fields = Fields(body)
    previous, conversation = fields.text("previous_response_id"), fields.value("conversation", str, dict)
    if isinstance(conversation, dict):
        conversation = fields.inner("conversation").text("id")
        if conversation is None:
            raise RequestError("conversation needs an id, which is a text", "conversation")
    if previous is not None and conversation is not None:
        raise RequestError("previous_response_id and conversation exclude each other; give one", "conversation")
    return {"previous_response_id": previous, "conversation": conversation}


def conversation_fields(body: dict[str, Any]) -> tuple[tuple[tuple[str, bytes], ...], dict[str, str] | None]:
    """Returns the checked `items`, as pairs of an id and JSON, and the `metadata` of a body of /v1/conversations."""
    for name in body.keys() - {"items", "metadata"}:
        raise RequestError(f"unknown field {name[:64]!r}: known are items and metadata", name[:64], "unknown_parameter")
    fields = Fields(body)
    items = fields.value("items", list) or []
    History("items").read(items)
    metadata = fields.value("metadata", dict)
    for key, value in (metadata or {}).items():
        if len(key) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            message = f"metadata[{key[:MAX_KEY]!r}] must be a text of at most {MAX_VALUE} characters, its name of 64"
            raise RequestError(message, "metadata")
    if metadata is not None and len(metadata) > MAX_PAIRS:
        raise RequestError(f"metadata has {len(metadata)} pairs; at most {MAX_PAIRS} are kept", "metadata")
    return tuple(named_items(items)), metadata
