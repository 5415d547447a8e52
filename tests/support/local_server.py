"""HTTP servers on 127.0.0.1 for tests: a package index as pip asks it, a model hub as huggingface_hub asks it."""

import contextlib
import hashlib
import http.server
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator


class Server(http.server.ThreadingHTTPServer):
    """Runs in a thread for as long as the `with` lasts. `asked` holds the method and path of each request.

    `cut`: bodies of more bytes than this end after it, with the connection; None: they are whole.
    `status`: what everything is answered with; None: as it should be.
    """

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer  # (path, headers) -> (status, headers, body)
        self.asked: list[str] = []
        self.cut: int | None = None
        self.status: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """A client that has gone is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        status, headers, body = (
            (self.server.status, {}, b"")
            if self.server.status
            else self.server.answer(self.path.split("?")[0], self.headers)
        )
        begin = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if begin and status == 200:
            first, last = int(begin[1]), min(int(begin[2] or len(body)), len(body) - 1)
            status, headers = 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
            body = body[first : last + 1]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut is not None and len(body) > self.server.cut:
            self.wfile.write(body[: self.server.cut])
            self.close_connection = True
            return
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def running(answer) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def wheel(package: str, version: str, members: dict[str, bytes]) -> tuple[str, bytes]:
    """A wheel's name and bytes, as an index gives it."""
    name, buffer = package.replace("-", "_"), io.BytesIO()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: no-such-package-anywhere\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def package_index(*wheels: tuple[str, bytes]):
    """An index of wheels under /simple/, to be given to `running`."""
    files = dict(wheels)

    def answer(path: str, _) -> tuple[int, dict, bytes]:
        if path.startswith("/simple/"):
            package = path.split("/")[2].replace("-", "_")
            links = [
                f'<a href="/files/{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a>'
                for name, data in files.items()
                if name.startswith(f"{package}-")
            ]
            return (
                (200 if links else 404),
                {"Content-Type": "text/html"},
                f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode(),
            )
        data = files.get(path.removeprefix("/files/"))
        return (404, {}, b"") if data is None else (200, {"Content-Type": "application/octet-stream"}, data)

    return answer


def model_hub(
    repositories: dict[str, dict[str, bytes]],
    gated: str = "",
    token: str = "secret",
    claimed: dict[str, str] | None = None,
):
    """A hub of `owner/repo: {file: bytes}`, to be given to `running`.

    `gated`: a repository that needs the token. `claimed`: SHA-256 by file, which the hub says that they have.
    """
    commit = "c" * 40

    def digest(name: str, data: bytes) -> str:
        return (claimed or {}).get(name) or hashlib.sha256(data).hexdigest()

    def answer(path: str, headers) -> tuple[int, dict, bytes]:
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(?:/revision/[^/]+)?(?:/resolve/[^/]+/(.+))?", path)
        files = repositories.get(match[1]) if match else None
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
        if match[1] == gated and headers.get("Authorization") != f"Bearer {token}":
            return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted"}, b"{}"
        if path.startswith("/api/models/"):
            siblings = [
                {
                    "rfilename": n,
                    "size": len(d),
                    "blobId": "b",
                    "lfs": {"sha256": digest(n, d), "size": len(d), "pointerSize": 130},
                }
                for n, d in files.items()
            ]
            info = {
                "_id": "1",
                "id": match[1],
                "modelId": match[1],
                "sha": commit,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": siblings,
            }
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        data = files.get(match[2])
        if data is None:
            return (
                404,
                {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit},
                b"",
            )
        return (
            200,
            {
                "ETag": f'"{digest(match[2], data)}"',
                "X-Repo-Commit": commit,
                "Content-Type": "application/octet-stream",
            },
            data,
        )

    return answer
