"""Error answers: one exception, and the JSON formats that OpenAI's and Anthropic's clients expect."""

from typing import Any

from ckdist.errors import CkdistError, RequestError, UserError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
ANTHROPIC = "/v1/messages"  # start of its paths
OLLAMA = "/api/"
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
    """The error answer to a request.

    Attributes:
        status: HTTP status.
        message: Text for the client.
        field: The field of the request that is wrong.
        code: OpenAI's code of the error; null in the answer if there is none.
        details: Further numbers in the error object.
        retry_after: Seconds after which the same request may succeed.
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
        """Returns the answer to `error`. The client does not see the text of errors outside `ckdist.errors`."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, RequestError):
            return cls(400, str(error), error.field, error.code, error.details)
        if isinstance(error, UserError):
            return cls(400, str(error))
        if isinstance(error, CkdistError):
            return cls(500, str(error))
        return cls(500, "internal error; the server's log has the details")

    def body_for(self, path: str) -> dict[str, Any]:
        """Returns the JSON of the answer: the error object of Anthropic or Ollama on their paths, else OpenAI's."""
        if path.startswith(OLLAMA):
            return {"error": self.message}
        if not path.startswith(ANTHROPIC):
            code = self.code or CODES.get(self.status)
            told = {"message": self.message, "type": self.kind, "param": self.field, "code": code}
            return {"error": {**told, **self.details}}
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def kind(self) -> str:
        """OpenAI's type of errors with this status."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
