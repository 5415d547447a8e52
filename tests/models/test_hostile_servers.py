"""Models at a URL whose server lies, sends too much, redirects elsewhere, or changes the file meanwhile."""

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
from types import SimpleNamespace

import pytest

from ckdist.errors import CkdistError, ConfigError, FetchError
from ckdist.hub import remote_file, web_file
from ckdist.hub.remote_file import BLOCK, fetch_ranges
from ckdist.hub.resolve import find
from ckdist.hub.store import FOLDER_VARIABLE
from ckdist.hub.web_file import WebFile
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.paths import GOLDEN

DATA = (GOLDEN / "gguf" / "BF16.gguf").read_bytes()
PIN = hashlib.sha256(DATA).hexdigest()


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers by the path: /long, /chunked, /changed, /grown, /packed, /shifted, /loop, /there, /whole, /good."""

    protocol_version = "HTTP/1.1"
    sent = 0
    requests = 0

    def do_GET(self):
        kind, asked = self.path.strip("/").partition(".")[0], re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        begin, last = int(asked[1]), int(asked[2])
        Liar.requests += 1
        first = (begin, last) == (0, 0)
        body, total = DATA[begin : last + 1], len(DATA) + (kind == "grown" and not first)
        if kind in ("loop", "there"):
            target = "/loop.gguf" if kind == "loop" else "/good.gguf"
            self.answer(302, {"Location": target, "Content-Length": "0"}, b"")
            return
        if kind == "whole":
            self.answer(200, {"Content-Length": str(len(DATA))}, DATA)
            return
        if kind in ("long", "chunked") and not first:
            body += b"X" * 20_000_000
        shift = int(kind == "shifted" and not first)
        headers = {"Content-Range": f"bytes {begin + shift}-{last + shift}/{total}", "ETag": '"1"'}
        headers |= {"Content-Encoding": "gzip"} if kind == "packed" else {}
        headers |= {"ETag": '"2"'} if kind == "changed" and not first else {}
        headers |= {"Transfer-Encoding": "chunked"} if kind == "chunked" else {"Content-Length": str(len(body))}
        self.answer(206, headers, body)

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            for at in range(0, len(body), 1 << 16):
                part = body[at : at + (1 << 16)]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if "Transfer-Encoding" in headers else part)
                Liar.sent += len(part)
            if "Transfer-Encoding" in headers:
                self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def liar(tmp_path, monkeypatch):
    """The URL of a server that lies."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(remote_file.time, "sleep", lambda seconds: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Liar.sent = Liar.requests = 0
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.parametrize(
    "kind, line",
    [
        ("long", r"sends \d+ bytes, but \d+ were requested: nothing was read"),
        ("chunked", r"sends more than the \d+ requested bytes"),
        ("changed", r'changed while it was read \(ETag "1", now "2"\): start again'),
        ("grown", r"has \d+ bytes now, but had \d+: start again"),
        ("packed", r"is sent in encoding 'gzip', not plain"),
        ("shifted", r"sent bytes 1-\d+/\d+, but 0-\d+ was requested"),
        ("loop", r"redirects more than 5 times"),
    ],
)
def test_a_lie_is_refused_before_the_excess_is_read(liar, kind, line):
    with pytest.raises(FetchError, match=line):
        open_checkpoint(find(f"{liar}/{kind}.gguf"))
    assert Liar.sent < 12_000_000  # of 20 MB: what the sockets' buffers hold


def test_a_redirect_on_one_origin_is_followed(liar):
    assert len(open_checkpoint(find(f"{liar}/there.gguf")).tensors) == len(
        open_checkpoint(GOLDEN / "gguf" / "BF16.gguf").tensors
    )


def test_a_small_file_of_a_server_without_ranges_is_read_whole(liar):
    assert len(open_checkpoint(find(f"{liar}/whole.gguf")).tensors) > 10
    with open(find(f"{liar}/whole.gguf#sha256={PIN}"), "rb") as file:
        assert file.read() == DATA


def test_a_pinned_file_is_fetched_whole_and_compared_once(liar):
    path = find(f"{liar}/good.gguf#sha256={PIN}")
    with open(path, "rb") as file:
        assert file.read() == DATA
    before = Liar.requests
    assert find(f"{liar}/good.gguf#sha256={PIN.upper()}") == path and Liar.requests == before


def test_another_file_than_the_pinned_one_ends_before_it_is_read(liar, tmp_path):
    with pytest.raises(FetchError, match=rf"has SHA-256 {PIN[:16]}…, but the URL requires 00000000") as error:
        find(f"{liar}/good.gguf#sha256={'0' * 64}")
    assert "\n" not in str(error.value) and not list((tmp_path / "store").rglob("*.gguf"))


@pytest.mark.parametrize(
    "url, line",
    [
        ("file:///etc/hostname", "not a URL that a model is read from: use the path itself"),
        ("ftp://host/m.gguf", "not a URL that a model is read from: use one of https"),
        ("memory://m.gguf", "not a URL that a model is read from: use one of https"),
        ("https://host/m.gguf#sha256=12", "#sha256=12 is not known"),
        ("https://host/m.gguf#md5=1", "#md5=1 is not known"),
        (f"https://host/folder#sha256={PIN}", "is a folder of many files"),
        (f"https://host/m-00001-of-00002.gguf#sha256={PIN}", "has 2 files, and #sha256= has 1 numbers"),
        ("https://host:a/m.gguf", "is not a URL"),
    ],
)
def test_urls_that_no_model_is_read_from(url, line, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(line)):
        find(url)


ADDRESSES = {"hub.example": "93.184.216.34", "cdn.example": "93.184.216.35", "inside.example": "10.0.0.5"}


@pytest.fixture
def web(monkeypatch):
    """Answers by URL, (status, headers), and the requests for them: (URL, headers)."""
    asked, answers = [], {}

    def request(_method, url, headers, **_):
        asked.append((url, headers))
        status, own = answers[url]
        return SimpleNamespace(
            status=status, headers=own, length_remaining=0, read=lambda *_, **__: b"", close=lambda: None,
            release_conn=lambda: None,
        )  # fmt: skip

    def resolved(host, *_, **__):
        return [(socket.AF_INET, 0, 0, "", (ADDRESSES.get(host, host), 0))]

    monkeypatch.setattr(web_file, "_pool", lambda: SimpleNamespace(request=request))
    monkeypatch.setattr(web_file.socket, "getaddrinfo", resolved)
    return answers, asked


WHOLE = (206, {"Content-Range": "bytes 0-0/7", "ETag": '"1"'})


def test_credentials_stay_on_their_origin(web):
    answers, asked = web
    answers["https://hub.example/m.gguf"] = (302, {"Location": "/n.gguf"})
    answers["https://hub.example/n.gguf"] = (302, {"Location": "https://cdn.example/signed?key=1"})
    answers["https://cdn.example/signed?key=1"] = WHOLE
    assert WebFile("https://user:word@hub.example/m.gguf").describe()[0] == 7
    assert ["authorization" in {name.lower() for name in headers} for _, headers in asked] == [True, True, False]


@pytest.mark.parametrize(
    "target, line",
    [
        ("http://hub.example/m.gguf", "only redirects to https or on one origin are followed"),
        ("http://cdn.example/m.gguf", "only redirects to https or on one origin are followed"),
        ("https://inside.example/m.gguf", "an address of a private network"),
        ("https://127.0.0.1/m.gguf", "an address of a private network"),
        ("https://169.254.169.254/latest", "an address of a private network"),
        ("file:///etc/hostname", "not an https URL"),
        ("https://[", "not an https URL"),
        ("", "redirects more than 5 times"),
    ],
)
def test_redirects_that_are_not_followed(web, target, line):
    answers, asked = web
    answers["https://hub.example/m.gguf"] = (302, {"Location": target})
    with pytest.raises(FetchError, match=line):
        WebFile("https://hub.example/m.gguf").describe()
    assert {url for url, _ in asked} == {"https://hub.example/m.gguf"}


def test_a_local_server_does_not_redirect_to_another_port_in_clear(web):
    web[0]["http://127.0.0.1:1/m.gguf"] = (302, {"Location": "http://127.0.0.1:2/m.gguf"})
    with pytest.raises(FetchError, match="only redirects to https or on one origin are followed"):
        WebFile("http://127.0.0.1:1/m.gguf").describe()


def test_a_model_in_clear_is_accepted_from_this_machine_or_when_the_url_says_so(web):
    for name in ("hub.example", "inside.example"):
        with pytest.raises(ConfigError, match="is not encrypted, so others on the network can change the model"):
            WebFile(f"http://{name}/m.gguf")
        web[0][f"http://{name}/m.gguf"] = WHOLE
        for end in ("#unencrypted", f"#sha256={PIN}"):
            assert WebFile(f"http://{name}/m.gguf{end}").describe()[0] == 7
    web[0]["http://127.0.0.1/m.gguf"] = WHOLE
    assert WebFile("http://127.0.0.1/m.gguf").describe()[0] == 7


def test_a_model_folder_cannot_name_urls(liar, tmp_path):
    """Its NAME.parts would have this host ask a URL of the folder's author."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(BLOCK))
    record = {"url": f"{liar}/good.gguf", "size": BLOCK, "stamp": {}, "here": []}
    (tmp_path / "model.gguf.parts").write_text(json.dumps(record))
    for action in (lambda: open_checkpoint(path), lambda: fetch_ranges(path, [(0, 1)])):
        with pytest.raises(CkdistError, match=r"model\.gguf\.parts marks model\.gguf as incomplete"):
            action()
    assert Liar.requests == 0
