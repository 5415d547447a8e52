"""Receives uploaded files: a form as browsers and OpenAI's clients send it, written to disk as it arrives."""

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO

from starlette.requests import Request

from ckdist.serve.problems import Problem

MAX_FIELD = 1024  # bytes of any field but the file
MAX_HEADER = 4096
FORM = "multipart/form-data"


async def receive_form(
    request: Request, places: Mapping[str, pathlib.Path], most: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Writes the form's files to `places`, which has the names of their fields.

    Returns:
        The clients' names of the files that came, by their fields, and the other fields.

    Raises:
        Problem: 400 if the body is no such form or has no file, 413 if the files have more than `most` bytes.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind.decode("latin-1") != FORM or b"boundary" not in options:
        raise Problem(400, f"the body must be {FORM} with the fields {', '.join(places)}")
    with contextlib.ExitStack() as opened:
        form = _Form(places, most, opened)
        try:
            parser = MultipartParser(options[b"boundary"], form.callbacks())
            async for part in request.stream():
                parser.write(part)
            parser.finalize()
        except FormParserError as error:
            raise Problem(400, f"the form is damaged: {str(error)[:200]}") from None
    if not form.filenames or not form.ended:
        raise Problem(400, "the form has no file", "file", "missing_required_parameter")
    return form.filenames, {name: value.decode("utf-8", "replace") for name, value in form.fields.items()}


class _Form:
    """The parts of a form while they arrive."""

    def __init__(self, places: Mapping[str, pathlib.Path], most: int, opened: contextlib.ExitStack):
        self.filenames: dict[str, str] = {}
        self.fields: dict[str, bytes] = {}
        self.ended = False
        self._places, self._opened = places, opened
        self._most, self._size = most, 0
        self._name = ""
        self._file: BinaryIO | None = None
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}

    def callbacks(self) -> Any:
        """Returns the functions that the parser calls."""
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        """A part begins."""
        self._headers, self._name, self._file = {}, "", None

    def header_field(self, data: bytes, begin: int, end: int) -> None:
        """A piece of a header's name."""
        self._header += data[begin:end]
        self._check_headers()

    def header_value(self, data: bytes, begin: int, end: int) -> None:
        """A piece of a header's value."""
        self._value += data[begin:end]
        self._check_headers()

    def header_end(self) -> None:
        """A header is complete."""
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def headers_finished(self) -> None:
        """The part's contents begin. Raises Problem 400 for a second file of one name."""
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self._places:
            if self._name in self.filenames:
                raise Problem(400, "the form has two files; send one", self._name)
            self.filenames[self._name] = options.get(b"filename", b"file").decode("utf-8", "replace")
            self._file = self._opened.enter_context(self._places[self._name].open("wb"))

    def part_data(self, data: bytes, begin: int, end: int) -> None:
        """A piece of the part's contents. Raises Problem 413 if there are too many."""
        if self._file is not None:
            self._size += end - begin
            if self._size > self._most:
                raise Problem(413, f"the file has more than {self._most} bytes, which are allowed", "file")
            self._file.write(data[begin:end])
            return
        kept = self.fields.get(self._name, b"")
        if len(kept) + end - begin > MAX_FIELD or len(self.fields) > MAX_FIELD:
            raise Problem(413, f"the field {self._name[:64]!r} has more than {MAX_FIELD} bytes")
        self.fields[self._name] = kept + data[begin:end]

    def end(self) -> None:
        """The form is complete."""
        self.ended = True

    def _check_headers(self) -> None:
        if len(self._header) + len(self._value) > MAX_HEADER or len(self._headers) > MAX_HEADER:
            raise Problem(413, f"a header of the form has more than {MAX_HEADER} bytes")
