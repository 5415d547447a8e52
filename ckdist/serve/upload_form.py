"""Receives an uploaded file: a form as browsers and OpenAI's clients send it, written to disk as it arrives."""

import pathlib
from typing import Any, BinaryIO

from starlette.requests import Request

from ckdist.serve.problems import Problem

MAX_FIELD = 1024  # bytes of any field but the file
MAX_HEADER = 4096
FORM = "multipart/form-data"


async def receive_form(request: Request, path: pathlib.Path, most: int) -> tuple[str, str]:
    """Writes the form's `file` to `path`. Returns its name and the form's `purpose`.

    Raises Problem: 400 if the body is no such form, 413 if the file has more than `most` bytes.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind.decode("latin-1") != FORM or b"boundary" not in options:
        raise Problem(400, f"the body must be {FORM} with the fields file and purpose")
    with path.open("wb") as file:
        form = _Form(file, most)
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        try:
            async for part in request.stream():
                parser.write(part)
            parser.finalize()
        except FormParserError as error:
            raise Problem(400, f"the form is damaged: {str(error)[:200]}") from None
    if form.filename is None or not form.ended:
        raise Problem(400, "the form has no file", "file", "missing_required_parameter")
    return form.filename, form.fields.get("purpose", b"").decode("utf-8", "replace")


class _Form:
    """The parts of a form while they arrive."""

    def __init__(self, file: BinaryIO, most: int):
        self.filename: str | None = None
        self.fields: dict[str, bytes] = {}
        self.ended = False
        self._file, self._most, self._size = file, most, 0
        self._name, self._is_file = "", False
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}

    def callbacks(self) -> Any:
        """Returns the functions that the parser calls."""
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        """A part begins."""
        self._headers, self._name, self._is_file = {}, "", False

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
        """The part's contents begin. Raises Problem 400 for a second file."""
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise Problem(400, "the form has two files; send one", "file")
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")

    def part_data(self, data: bytes, begin: int, end: int) -> None:
        """A piece of the part's contents. Raises Problem 413 if there are too many."""
        if self._is_file:
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
