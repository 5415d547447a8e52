"""The names of models at a URL: which kinds there are, and what a fragment says about how to read them."""

import re
from dataclasses import dataclass

from ckdist.errors import ConfigError, FetchError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
WEB = ("https", "http")
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # by fsspec
MISSING_LIBRARY = "models at a URL need more libraries: pip install 'ckdist[remote]'"


class NotThereError(FetchError):
    """The server has no such file, or does not show it."""


@dataclass(frozen=True)
class Fragment:
    """What stands behind `#` in a model's URL."""

    digests: tuple[str, ...] = ()  # SHA-256 in hex, one for each file of a split model
    unencrypted: bool = False  # plain http to another host is accepted


def is_url(name: str) -> bool:
    """Whether a model's name is a URL."""
    return SCHEME.match(name) is not None


def shown(url: str) -> str:
    """A URL for messages: without a password, and without query and fragment."""
    return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url, maxsplit=1)[0])


def scheme_of(url: str) -> str:
    """The kind of a URL. ConfigError for one that models are not read from."""
    scheme = url.partition("://")[0].lower()
    if "::" in url or scheme not in (*WEB, *OBJECT_STORES):
        remedy = "give the path itself" if scheme == "file" else f"use one of {', '.join((*WEB, *OBJECT_STORES))}"
        raise ConfigError(f"{shown(url)[:200]} is not a URL that a model is read from: {remedy}")
    return scheme


def fragment_of(url: str) -> Fragment:
    """What a URL's fragment says. ConfigError for anything but `sha256=HEX` or `unencrypted`."""
    text = url.partition("#")[2]
    if text in ("", "unencrypted"):
        return Fragment(unencrypted=bool(text))
    name, _, values = text.partition("=")
    digests = tuple(values.lower().split(","))
    if name != "sha256" or not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests):
        raise ConfigError(
            f"{shown(url)[:200]}: #{text[:80]} is not known; #sha256=HEX (64 digits, one number for each file of a "
            "split model) and #unencrypted are"
        )
    return Fragment(digests)
