"""The exceptions of ckdist: one tree, drawn here.

    CkdistError
    ├── UserError                what the user gave cannot be done; exit code 2, HTTP 4xx
    │   ├── ConfigError          a flag, a field of a configuration, a port in use
    │   ├── ModelFileError       a file that is not a model, is truncated, or lies about itself
    │   ├── ArchitectureError    a model family that is not known
    │   ├── LayoutError          a named dimension that cannot be sharded so
    │   ├── CapacityError        more memory or context than there is
    │   └── RequestError         a request with a wrong field or a prompt that does not fit
    └── EngineError              what broke while running; exit code 1, HTTP 5xx
        ├── CommError            a peer died, stalled or disagrees; names the rank and the step
        ├── FetchError           a model could not be fetched: no network, a full disk, a wrong checksum
        └── NativeError          the native runtime refused or failed

Every message is one line: what was wrong, both numbers, and the remedy.
"""


class CkdistError(Exception):
    """Root of all errors that ckdist raises on purpose."""


class UserError(CkdistError):
    """What the user gave cannot be done. Commands end with exit code 2, requests with HTTP 4xx."""


class ConfigError(UserError):
    """A flag or a field of a configuration is wrong, or a resource that it names is taken."""


class ModelFileError(UserError):
    """A model file is missing, truncated, hostile, or inconsistent with itself."""


class ArchitectureError(UserError):
    """The model's family is not known; the message lists the known ones."""


class LayoutError(UserError):
    """A named dimension cannot be sharded over a mesh axis in that way."""


class CapacityError(UserError):
    """More memory or context is needed than there is; the message says what would fit."""


class RequestError(UserError):
    """A request has a wrong field or does not fit the context.

    `field` is the name of the offending request field, or None; `code` is OpenAI's word for the fault, or None;
    `details` are numbers that a program may read, by name.
    """

    def __init__(
        self, message: str, field: str | None = None, code: str | None = None, details: dict[str, int] | None = None
    ):
        super().__init__(message)
        self.field, self.code, self.details = field, code, details or {}


class EngineError(CkdistError):
    """Something broke while running. Commands end with exit code 1, requests with HTTP 5xx."""


class CommError(EngineError):
    """A peer died, stalled, or runs a different program."""


class FetchError(EngineError):
    """A model could not be fetched or kept: no network, a lost connection, a full disk, a wrong checksum.

    It meets every rank alike.
    """


class NativeError(EngineError):
    """The native runtime refused a call or failed in it."""
