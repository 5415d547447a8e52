"""URLs of models: the allowed schemes, and the options in the fragment."""

import re
from dataclasses import dataclass

from ckdist.errors import ConfigError, FetchError, one_line

PREFIX = "hf:"  # of a repository of the Hugging Face Hub
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
WEB = ("https", "http")
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # read with fsspec
MISSING_LIBRARY = "models at a URL need more libraries: pip install 'ckdist[remote]'"


class NotThereError(FetchError):
    """The server does not have the file, or refuses access to it."""


@dataclass(frozen=True)
class Fragment:
    """The options after `#` in a model's URL."""

    digests: tuple[str, ...] = ()  # SHA-256 in hex, one for each file of a split model
    unencrypted: bool = False  # plain http to another host is accepted


def is_url(name: str) -> bool:
    """True if a model's name is a URL."""
    return SCHEME.match(name) is not None


def shown(url: str) -> str:
    """Returns a URL for messages: without password, query and fragment."""
    return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url, maxsplit=1)[0])


def typed_line(error: BaseException) -> str:
    """Returns a library's error for messages: its type, and its text on one line."""
    return f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__


def scheme_of(url: str) -> str:
    """Returns the scheme of a URL. Raises ConfigError if models cannot be read from it."""
    scheme = url.partition("://")[0].lower()
    if "::" in url or scheme not in (*WEB, *OBJECT_STORES):
        remedy = "use the path itself" if scheme == "file" else f"use one of {', '.join((*WEB, *OBJECT_STORES))}"
        raise ConfigError(f"{shown(url)[:200]} is not a URL that a model is read from: {remedy}")
    return scheme


def fragment_of(url: str) -> Fragment:
    """Parses a URL's fragment. Raises ConfigError if it is neither `sha256=HEX` nor `unencrypted`."""
    text = url.partition("#")[2]
    if text in ("", "unencrypted"):
        return Fragment(unencrypted=bool(text))
    name, _, values = text.partition("=")
    digests = tuple(values.lower().split(","))
    if name != "sha256" or not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests):
        raise ConfigError(
            f"{shown(url)[:200]}: #{text[:80]} is not known: use #sha256=HEX (64 digits, one number for each file of a "
            "split model) or #unencrypted"
        )
    return Fragment(digests)
