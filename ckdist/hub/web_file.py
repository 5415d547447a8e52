"""Reads ranges of a file over HTTPS from untrusted servers, which may lie, send too much, or redirect elsewhere."""

import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from ckdist.errors import ConfigError, FetchError
from ckdist.hub.model_url import MISSING_LIBRARY, NotThereError, fragment_of, shown

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
ABSENT = {401: "needs credentials", 403: "is refused", 404: "does not exist", 410: "does not exist any more"}
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
CONNECTIONS = 4  # open connections per host
PIECE = 1 << 18  # bytes
MAX_WHOLE_BYTES = 4 << 20  # largest file that is read from a server without ranges
VERSION = ("ETag", "Last-Modified")
RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class RangesError(ValueError):
    """The server sends only whole files."""


class WebFile:
    """The file at one http or https URL. Threads may share it.

    Redirects must lead to https or stay on one origin. They never lead from a public address to a private one, and
    carry no credentials to another origin.

    Raises:
        ConfigError: The URL is plain http to another host, and its fragment does not allow that.
    """

    def __init__(self, url: str):
        self.url, self.shown = url.partition("#")[0], shown(url)
        self._first = _split(self.url)
        self._is_private = _is_private(self._first, self.shown)
        fragment = fragment_of(url)
        trusted = fragment.unencrypted or bool(fragment.digests)
        if self._first.scheme == "http" and not trusted and not _is_loopback(self._first):
            raise ConfigError(
                f"{self.shown} is not encrypted, so others on the network can change the model: use https, or end the "
                "URL with #sha256=HEX, or with #unencrypted on a network that you trust"
            )

    def describe(self) -> tuple[int, dict[str, str]]:
        """Returns the size of the file, and the headers that identify its version (ETag, Last-Modified).

        Raises NotThereError, FetchError, or urllib3's errors.
        """
        with self._get(0, 1, {}) as answer:
            if answer.status == 206:
                size = int(self._range_of(answer)[3])
                self._body(answer, 1)
            else:
                length = answer.headers.get("Content-Length", "")
                size = int(length) if re.fullmatch(r"\d{1,19}", length) else 0
            return size, _stamp(answer)

    def read(self, begin: int, end: int, size: int, stamp: dict[str, str]) -> bytes:
        """Returns bytes [begin, end) of a file with `size` bytes and `stamp`. Fewer if the connection ends early.

        Raises:
            FetchError: The file has changed, or the server sends more than requested.
            RangesError: The server does not send ranges.
        """
        etag = stamp.get("ETag", "")
        with self._get(begin, end, {"If-Range": etag} if etag.startswith('"') else {}) as answer:
            now = _stamp(answer)
            name = next((name for name in VERSION if name in stamp and name in now), None)
            if name and now[name] != stamp[name]:
                raise FetchError(
                    f"{self.shown} changed while it was read ({name} {stamp[name]}, now {now[name]}): start again"
                )
            if answer.status != 206 and size > MAX_WHOLE_BYTES and (begin, end) != (0, size):
                raise RangesError("the server sends no ranges of bytes")
            if answer.status != 206:
                return self._body(answer, size)[begin:end]
            found = self._range_of(answer)
            if int(found[3]) != size:
                raise FetchError(f"{self.shown} has {found[3]} bytes now, but had {size}: start again")
            if (int(found[1]), int(found[2])) != (begin, end - 1):
                raise FetchError(f"{self.shown} sent {found[0]}, but {begin}-{end - 1} was requested")
            return self._body(answer, end - begin)

    def _body(self, answer: "BaseHTTPResponse", wanted: int) -> bytes:
        """Reads at most `wanted` bytes. Raises FetchError as soon as more are announced or arrive."""
        announced = answer.headers.get("Content-Length", "")
        if re.fullmatch(r"\d+", announced) and int(announced) > wanted:
            raise FetchError(f"{self.shown} sends {announced} bytes, but {wanted} were requested: nothing was read")
        data = bytearray()
        while len(data) <= wanted and (part := answer.read(min(PIECE, wanted + 1 - len(data)), decode_content=False)):
            data += part
        if len(data) > wanted:
            raise FetchError(f"{self.shown} sends more than the {wanted} requested bytes")
        return bytes(data)

    def _range_of(self, answer: "BaseHTTPResponse") -> re.Match[str]:
        given = answer.headers.get("Content-Range", "")
        found = RANGE.fullmatch(given)
        if found is None:
            raise FetchError(f"{self.shown} sends a range that cannot be read: {given[:60]!r}")
        return found

    @contextlib.contextmanager
    def _get(self, begin: int, end: int, headers: dict[str, str]) -> "Iterator[BaseHTTPResponse]":
        """Yields the answer to a request for bytes [begin, end) after redirects: 200 or 206, with its body unread."""
        own = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity", **headers}
        url = self.url
        for _ in range(MAX_REDIRECTS + 1):
            place = _split(url)
            credentials = _authorization(self._first) if _origin(place) == _origin(self._first) else {}
            answer = _pool().request(
                "GET", _without_user(place), headers={**own, **credentials}, redirect=False, retries=False,
                preload_content=False,
            )  # fmt: skip
            complete = False
            try:
                if answer.status not in REDIRECTS:
                    yield self._checked(answer)
                    complete = answer.length_remaining == 0
                    return
                url = self._redirected(url, answer.headers.get("Location", ""))
            finally:
                answer.release_conn() if complete else answer.close()
        raise FetchError(f"{self.shown} redirects more than {MAX_REDIRECTS} times")

    def _checked(self, answer: "BaseHTTPResponse") -> "BaseHTTPResponse":
        if answer.status in ABSENT:
            raise NotThereError(f"{self.shown} {ABSENT[answer.status]} (HTTP {answer.status}): check its spelling")
        if answer.status >= 500 or answer.status == 429:
            raise OSError(f"the server answered with HTTP {answer.status}")  # the caller retries
        if answer.status not in (200, 206):
            raise FetchError(f"{self.shown} cannot be read: the server answered with HTTP {answer.status}")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise FetchError(f"{self.shown} is sent in encoding {answer.headers['Content-Encoding'][:40]!r}, not plain")
        return answer

    def _redirected(self, url: str, location: str) -> str:
        """Returns the URL of a redirect. Raises FetchError if it must not be followed."""
        before = urlsplit(url)
        try:
            target = urljoin(url, location).partition("#")[0]
            place = _split(target)
        except (ConfigError, ValueError):  # ValueError: a bracket is missing
            raise FetchError(f"{self.shown} redirects to {shown(location)[:200]}, which is not an https URL") from None
        where = shown(target)[:200]
        if place.scheme != "https" and _origin(place) != _origin(before):
            raise FetchError(
                f"{self.shown} redirects to {where}: only redirects to https or on one origin are followed; "
                "use that URL itself if you trust it"
            )
        if not self._is_private and _is_private(place, self.shown):
            raise FetchError(f"{self.shown} redirects to {where}, which is an address of a private network: refused")
        return target


@functools.cache
def _pool() -> "PoolManager":
    try:
        from urllib3 import PoolManager, Timeout
    except ImportError:
        raise ConfigError(MISSING_LIBRARY) from None
    return PoolManager(8, maxsize=CONNECTIONS, timeout=Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS))


def _split(url: str) -> SplitResult:
    """Parses a URL. Raises ConfigError if it is not http or https, or has no host."""
    try:
        place = urlsplit(url)
        if place.scheme in ("http", "https") and place.hostname and (place.port is None or place.port > 0):
            return place
    except ValueError:  # the port is not a number
        pass
    raise ConfigError(f"{shown(url)[:200]} is not a URL that a model is read from: write https://host/model.gguf")


def _origin(place: SplitResult) -> tuple[str, str | None, int]:
    return place.scheme, place.hostname, place.port or (443 if place.scheme == "https" else 80)


def _without_user(place: SplitResult) -> str:
    return place._replace(netloc=place.netloc.rpartition("@")[2], fragment="").geturl()


def _authorization(place: SplitResult) -> dict[str, str]:
    from urllib.parse import unquote

    from urllib3.util import make_headers

    if place.username is None:
        return {}
    return make_headers(basic_auth=f"{unquote(place.username)}:{unquote(place.password or '')}")


def _addresses(place: SplitResult, name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(place.hostname, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise FetchError(f"{name}: host {place.hostname} is not known; check its spelling, and the network") from None
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def _is_private(place: SplitResult, name: str) -> bool:
    """True if a host has an address outside the public internet."""
    return not all(address.is_global for address in _addresses(place, name))


def _is_loopback(place: SplitResult) -> bool:
    return all(address.is_loopback for address in _addresses(place, str(place.hostname)))


def _stamp(answer: "BaseHTTPResponse") -> dict[str, str]:
    return {name: answer.headers[name][:200] for name in VERSION if name in answer.headers}
