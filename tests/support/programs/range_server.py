"""Serves a folder over HTTP: range_server.py ADDRESS PORT FOLDER [whole]. It answers requests for a range of bytes;
`whole`: as a server that cannot, with all bytes.
"""

import functools
import http.server
import io
import os
import re
import sys


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, and parts of them."""

    ranges = True

    def send_head(self):
        path, asked = self.translate_path(self.path), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not (self.ranges and asked and os.path.isfile(path)):
            return super().send_head()
        size, begin = os.path.getsize(path), int(asked[1])
        end = min(int(asked[2] or size - 1), size - 1) + 1
        if begin >= end:
            self.send_error(416)
            return None
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", self.date_time_string(os.path.getmtime(path)))
        self.end_headers()
        return io.BytesIO(data)

    def log_message(self, *words) -> None:
        """Nothing."""


def server(address: str, port: int, folder: str, ranges: bool = True) -> http.server.ThreadingHTTPServer:
    """One that `serve_forever` starts and `shutdown` ends."""
    kind = type("Handler", (Handler,), {"ranges": ranges})
    return http.server.ThreadingHTTPServer((address, port), functools.partial(kind, directory=folder))


if __name__ == "__main__":
    server(sys.argv[1], int(sys.argv[2]), sys.argv[3], "whole" not in sys.argv[4:]).serve_forever()
