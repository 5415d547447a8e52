"""The tree of ckdist's exceptions.

    CkdistError
    ├── UserError                the input is wrong or not supported; exit code 2, HTTP 4xx
    │   ├── ConfigError          a flag, a field of a configuration, a port in use
    │   ├── ModelFileError       a file that is not a model, is truncated, or inconsistent
    │   ├── ArchitectureError    an unknown model family
    │   ├── LayoutError          a named dimension cannot be sharded in this way
    │   ├── CapacityError        not enough memory or context
    │   └── RequestError         a request with a wrong field or a prompt that does not fit
    └── EngineError              a failure at run time; exit code 1, HTTP 5xx
        ├── CommError            a peer died, stalled or disagrees; names the rank and the step
        ├── FetchError           a model could not be fetched: no network, a full disk, a wrong checksum
        └── NativeError          the native runtime rejected a call or failed

Each message is one line with the cause, both numbers, and the remedy.
"""

from collections.abc import Iterable


def one_line(error: object, most: int = 200) -> str:
    """The text of a foreign error for a message: at most `most` printable characters. Its type if it is empty."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    return " ".join(text.split())[:most] or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint for the end of a message: ", did you mean NEAREST?", or "" if no known name is near."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean {close[0]}?" if close else ""


class CkdistError(Exception):
    """Base of all errors that ckdist raises deliberately."""


class UserError(CkdistError):
    """The user's input is wrong or not supported. Commands end with exit code 2, requests with HTTP 4xx."""


class ConfigError(UserError):
    """A flag or a field of a configuration is wrong, or a resource that it names is in use."""


class ModelFileError(UserError):
    """A model file is missing, truncated, hostile, or inconsistent."""


class ArchitectureError(UserError):
    """The model's family is not known; the message lists the known ones."""


class LayoutError(UserError):
    """A named dimension cannot be sharded over a mesh axis in that way."""


class CapacityError(UserError):
    """There is not enough memory or context. The message names a value that fits."""


class RequestError(UserError):
    """A request has a wrong field or does not fit the context.

    Attributes:
        field: The wrong field of the request, or None.
        code: OpenAI's error code, or None.
        details: Numbers for programs, by name.
    """

    def __init__(
        self, message: str, field: str | None = None, code: str | None = None, details: dict[str, int] | None = None
    ):
        super().__init__(message)
        self.field, self.code, self.details = field, code, details or {}


class UnknownAdapterError(RequestError):
    """A request names an adapter that is not loaded."""


class EngineError(CkdistError):
    """A failure at run time. Commands end with exit code 1, requests with HTTP 5xx."""


class CommError(EngineError):
    """A peer died, stalled, or runs a different program."""


class FetchError(EngineError):
    """A model could not be fetched or stored: no network, a lost connection, a full disk, a wrong checksum.

    All ranks raise the same error.
    """


class NativeError(EngineError):
    """The native runtime rejected a call or failed in it."""
