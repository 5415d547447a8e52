"""`ckdist serve`."""

import re
from dataclasses import dataclass

from ckdist.config.engine import EngineConfig
from ckdist.config.options import byte_size, integer, option, real
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """`ckdist serve`: answer the OpenAI API over HTTP."""

    host: str = option("127.0.0.1", "--host", help="address to listen on")
    port: int = option(
        8080, "--port", parse=integer, low=0, high=65535, metavar="N", help="port to listen on; 0: any free one"
    )
    alias: str | None = option(
        None, "-a", "--alias", metavar="NAME", help="model name in answers (default: from the model file)"
    )
    metrics_port: int | None = option(
        None, "--metrics-port", parse=integer, low=0, high=65535, metavar="N",
        help="port of its own for /metrics, /livez and /readyz, without an API key; 0: any free one",
    )  # fmt: skip
    no_auth: bool = option(
        False, "--no-auth", help="serve an address beyond this host without an API key, which is refused otherwise"
    )
    api_key: str | None = option(
        None,
        "--api-key",
        metavar="KEY",
        secret=True,
        help="key that clients must send; several are separated by commas; ps shows it: better use CKDIST_API_KEY",
    )
    api_key_file: str | None = option(
        None,
        "--api-key-file",
        metavar="FILE",
        help="file of mode 600 with one key per line, or a TOML table [[key]] for each; SIGHUP reads it again",
    )
    shared_cache: bool = option(
        False, "--shared-cache", help="reuse cached prompts across API keys; only cache_salt tells tenants apart"
    )
    special_tokens_in_text: bool = option(
        False, "--special-tokens-in-text", help="let control tokens stand in the text of messages"
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "--cors-origin",
        repeat=True,
        metavar="ORIGIN",
        help=(
            "web pages of this origin may use the server, as https://chat.example:3000; * is all; may be given "
            "several times"
        ),
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "--allowed-host",
        repeat=True,
        metavar="NAME",
        help=(
            "name by which clients may call a server on loopback, beside localhost and addresses; may be given "
            "several times"
        ),
    )
    max_queue: int = option(
        128,
        "--max-queue",
        parse=integer,
        low=0,
        high=1 << 16,
        metavar="N",
        help="most sequences waiting beyond --parallel; then HTTP 429",
    )
    max_body: int = option(
        8 << 20, "--max-body", parse=byte_size, low=1 << 10, high=1 << 30, metavar="SIZE", help="largest request body"
    )
    pooling: str = option(
        "auto",
        "--pooling",
        choices=("auto", "mean", "last", "cls", "none"),
        help="how hidden states become an embedding (auto: as the model's files say; none: one for each token)",
    )
    strict_fields: bool = option(
        False, "--strict-fields", help="refuse requests with a field that is not known, instead of ignoring it"
    )
    no_webui: bool = option(False, "--no-webui", help="serve the API alone, without the page at /")
    log_file: str | None = option(
        None,
        "--log-file",
        metavar="FILE",
        help="append the HTTP process's log to this file; default: standard error",
    )
    log_format: str = option(
        "text", "--log-format", choices=("text", "json"), help="lines for people, or one JSON object per line"
    )
    no_log_requests: bool = option(False, "--no-log-requests", help="do not log a line for each request")
    log_prompts: bool = option(False, "--log-prompts", help="add each prompt's text to its request's line")
    timeout: float = option(
        600.0,
        "--timeout",
        parse=real,
        low=1,
        high=86400,
        metavar="SECONDS",
        help="a request without progress for so long is ended",
    )
    drain_timeout: float = option(
        30.0,
        "--drain-timeout",
        parse=real,
        low=0,
        high=86400,
        metavar="SECONDS",
        help="how long running requests may finish after SIGTERM",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_auth and (self.api_key or self.api_key_file):
            given = "--api-key" if self.api_key else f"--api-key-file {self.api_key_file}"
            raise ConfigError(f"--no-auth and {given} contradict one another: leave one out")
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not re.fullmatch(
                r"[a-z][a-z0-9+.-]*://[^/\s]+/?", origin, re.IGNORECASE
            ):
                raise ConfigError(f"--cors-origin ({origin}) must be scheme://host or scheme://host:port, or *")
        for host in self.allowed_host:
            if not re.fullmatch(r"[\w.-]+", host):
                raise ConfigError(f"--allowed-host ({host}) must be a name without port")
