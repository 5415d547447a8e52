"""Answers that are not 200: one exception, and the JSON shapes in which OpenAI's and Anthropic's clients expect it."""

from typing import Any

from ckdist.errors import CkdistError, RequestError, UserError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
ANTHROPIC = "/v1/messages"  # what its paths begin with
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CODES = {429: "rate_limit_exceeded"}


class Problem(CkdistError):  # noqa: N818 - RFC 9457's word
    """A request is answered with `status` and `message`.

    `field` is the offending field of the request; `code` is OpenAI's word for the fault, null in the answer where there
    is none; `details` are numbers that stand beside them in the error object. `retry_after`: seconds after which the
    same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        details: dict[str, int] | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.field, self.code, self.details = status, message, field, code, details or {}
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: Exception) -> "Problem":
        """What to answer when `error` ended a request; what is not from the tree of errors is not shown to the
        client.
        """
        if isinstance(error, Problem):
            return error
        if isinstance(error, RequestError):
            return cls(400, str(error), error.field, error.code, error.details)
        if isinstance(error, UserError):
            return cls(400, str(error))
        if isinstance(error, CkdistError):
            return cls(500, str(error))
        return cls(500, "internal error; the server's log has the details")

    def to_map(self) -> dict[str, Any]:
        """For another process, as msgpack takes it; `Problem(**map)` is the same one."""
        return dict(vars(self))

    def body_for(self, path: str) -> dict[str, Any]:
        """The answer's JSON on this path: Anthropic's error object on its own, on all others OpenAI's."""
        if not path.startswith(ANTHROPIC):
            return self.body()
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self) -> dict[str, Any]:
        """The answer's JSON: OpenAI's error object."""
        code = self.code or CODES.get(self.status)
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.field, "code": code, **self.details}
        }

    @property
    def kind(self) -> str:
        """OpenAI's word for errors of this status."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
