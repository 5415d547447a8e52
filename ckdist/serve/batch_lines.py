"""The lines of a batch: requests as OpenAI's batch files have them, checked before any of them runs.

Bodies stay in the file. A line in memory is its place, its id and a sorting key: prompts with a common beginning
become neighbours.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

from ckdist.errors import RequestError
from ckdist.serve.problems import Problem
from ckdist.serve.requests.field_table import check_fields
from ckdist.serve.requests.json_body import parse_object

# Path -> (kind of request of `prepare.KINDS`, the field that must be there).
PATHS = {
    "/v1/chat/completions": ("chat", "messages"),
    "/v1/completions": ("completion", "prompt"),
    "/v1/responses": ("response", "input"),
    "/v1/embeddings": ("embedding", "input"),
    "/v1/messages": ("messages", "messages"),
}
CUSTOM_ID = re.compile(r"[\x20-\x7e]{1,512}")
BodyCheck: TypeAlias = Callable[[dict[str, Any]], None]
MAX_LINE = 8 << 20
MAX_SHOWN = 20  # bad lines in a message
BEGINNINGS = (256, 2048, 16384)  # characters of a prompt whose checksums sort the lines


@dataclass(frozen=True, slots=True)
class Line:
    """One request.

    Attributes:
        number: Its number in the file, from 1.
        begin, size: Its place in the file, in bytes.
        order: Lines of a model, and then those with a common beginning of their prompts, are neighbours in this order.
    """

    number: int
    begin: int
    size: int
    custom_id: str
    url: str
    order: tuple[int, ...]


@dataclass(frozen=True)
class BadLine:
    """A line that no request can be made of."""

    number: int
    reason: str


class BadLinesError(RequestError):
    """A file has lines that cannot run."""

    def __init__(self, what: str, lines: list[BadLine], count: int):
        shown = "; ".join(f"line {line.number}: {line.reason}" for line in lines[:MAX_SHOWN])
        more = f"; and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
        said = f"{len(lines)} of {count} lines are wrong, so none was run: {shown}{more}"
        super().__init__(f"{what}: {said if count else lines[0].reason}", "input_file_id")
        self.lines = lines


def read_lines(
    file: BinaryIO, name: str, most: int, strict: bool, url: str | None = None, check: BodyCheck | None = None
) -> list[Line]:
    """Reads and checks all lines of a file.

    Args:
        file: Seekable.
        name: The file, for messages.
        most: Most lines.
        strict: Unknown fields are wrong.
        url: The path that all lines must have; None: any of PATHS.
        check: Raises Problem for the body of a line that has an unknown model.

    Raises:
        BadLinesError: Lines are wrong, or there is none.
    """
    lines, bad, seen = list[Line](), list[BadLine](), dict[str, int]()
    begin = number = 0
    while data := file.readline(MAX_LINE + 1):
        number += 1
        place, begin = begin, begin + len(data)
        if not data.strip():
            continue
        try:
            if len(data) > MAX_LINE:
                raise RequestError(f"it has more than the {MAX_LINE >> 20} MiB that are allowed")
            if len(lines) == most:
                raise RequestError(f"a batch has at most {most} lines")
            given = parse_object(data)
            custom_id, path, body = request_of(given, url)
            if custom_id in seen:
                raise RequestError(f"custom_id {custom_id[:64]!r} is that of line {seen[custom_id]}, too")
            check_body(path, body, strict)
            if check is not None:
                check(body)
        except (RequestError, Problem) as error:
            bad.append(BadLine(number, str(error)))
            if len(data) > MAX_LINE or len(lines) == most:
                break
            continue
        seen[custom_id] = number
        lines.append(Line(number, place, len(data), custom_id, path, order_of(body)))
    if bad or not lines:
        raise BadLinesError(name, bad or [BadLine(0, "the file has no request")], number)
    return lines


def request_of(line: Mapping[str, Any], url: str | None) -> tuple[str, str, dict[str, Any]]:
    """Returns a line's custom_id, path and body. Raises RequestError if one is wrong."""
    custom_id, path, body = (line.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not CUSTOM_ID.fullmatch(custom_id):
        raise RequestError("custom_id must be a string of 1 to 512 printable ASCII characters")
    if line.get("method", "POST") != "POST":
        raise RequestError(f"method ({str(line.get('method'))[:16]!r}) must be POST")
    path = url if path is None else path
    if not isinstance(path, str) or path not in PATHS:
        raise RequestError(f"url ({str(path)[:64]!r}) must be one of {', '.join(PATHS)}")
    if url is not None and path != url:
        raise RequestError(f"url ({path}) must be the batch's endpoint, {url}")
    if not isinstance(body, dict):
        raise RequestError("body must be an object")
    return custom_id, path, body


def check_body(path: str, body: dict[str, Any], strict: bool) -> None:
    """Raises RequestError for a body without prompt, for a stream, and for fields that the server refuses."""
    kind, needed = PATHS[path]
    if not body.get(needed):
        raise RequestError(f"body.{needed} is needed", needed)
    if body.get("stream"):
        raise RequestError("body.stream must be left out: answers go to a file", "stream")
    check_fields(kind, body, strict)


def order_of(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns checksums of the model and of the beginnings of the prompt, the shortest first."""
    given = body.get("messages") or body.get("prompt") or body.get("input") or ""
    text = json.dumps([body.get("system") or body.get("instructions") or "", body.get("tools") or "", given])
    model = json.dumps(body.get("model"))
    return tuple(zlib.crc32(part.encode()) for part in (model, *(text[:size] for size in BEGINNINGS)))


def body_at(file: BinaryIO, line: Line) -> dict[str, Any]:
    """Reads a line's body again. Raises RequestError if the file has changed meanwhile."""
    file.seek(line.begin)
    try:
        given = parse_object(file.read(line.size))
    except Problem as error:
        raise RequestError(f"line {line.number} has changed while the batch ran: {error}") from None
    if given.get("custom_id") != line.custom_id or not isinstance(given.get("body"), dict):
        raise RequestError(f"line {line.number} has changed while the batch ran")
    return given["body"]


def in_order(lines: list[Line]) -> Iterator[Line]:
    """Yields lines so that those of a model are neighbours, and of them prompts with a common beginning."""
    yield from sorted(lines, key=lambda line: (line.url, line.order, line.number))
