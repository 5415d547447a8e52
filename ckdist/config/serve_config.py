"""`ckdist serve`."""

import re
from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import byte_size, option
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """`ckdist serve`: answer the OpenAI API over HTTP."""

    host: str = option("127.0.0.1", "--host", help="address to listen on")
    port: int = option(8080, "--port", low=0, high=65535, metavar="N", help="port to listen on; 0: any free port")
    alias: str | None = option(
        None,
        "-a",
        "--alias",
        metavar="NAME",
        help="model name in answers (default: the name of the model's file or folder)",
    )
    metrics_port: int | None = option(
        None, "--metrics-port", kind=int, low=0, high=65535, metavar="N",
        help="also serve /metrics, /livez and /readyz on this port, without an API key; 0: any free port",
    )  # fmt: skip
    no_auth: bool = option(
        False, "--no-auth", help="allow other hosts to use the server without an API key; refused without this flag"
    )
    api_key: str | None = option(
        None,
        "--api-key",
        metavar="KEY",
        secret=True,
        help="key that clients must send, or several with commas; ps shows it, so prefer CKDIST_API_KEY",
    )
    api_key_file: str | None = option(
        None,
        "--api-key-file",
        metavar="FILE",
        help="file of mode 600 with one key per line, or one TOML table [[key]] per key; SIGHUP reloads it",
    )
    shared_cache: bool = option(
        False, "--shared-cache", help="reuse cached prompts across API keys; only cache_salt separates tenants"
    )
    special_tokens_in_text: bool = option(
        False, "--special-tokens-in-text", help="keep control tokens in the text of messages"
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "--cors-origin",
        repeat=True,
        metavar="ORIGIN",
        help=(
            "allow web pages of this origin to use the server, e.g. https://chat.example:3000; *: all origins; may be "
            "repeated"
        ),
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "--allowed-host",
        repeat=True,
        metavar="NAME",
        help=(
            "allow clients to call a server on loopback by this name, in addition to localhost and addresses; may be "
            "repeated"
        ),
    )
    prefill_file: str | None = option(
        None,
        "--prefill-file",
        metavar="FILE",
        help="compute these prompts before the first request: a text is a system prompt; a file *.jsonl has bodies of "
        "/v1/cache/prefill, one a line",
    )
    max_queue: int = option(
        128,
        "--max-queue",
        low=0,
        high=1 << 16,
        metavar="N",
        help="most waiting sequences beyond --parallel; more get HTTP 429",
    )
    max_body: int = option(
        8 << 20, "--max-body", parse=byte_size, low=1 << 10, high=1 << 30, metavar="SIZE", help="largest request body"
    )
    pooling: str = option(
        "auto",
        "--pooling",
        choices=("auto", "mean", "last", "cls", "none"),
        help="pooling of hidden states into an embedding (auto: from the model's files; none: one per token)",
    )
    strict_fields: bool = option(
        False, "--strict-fields", help="refuse requests with unknown fields, instead of ignoring the fields"
    )
    no_webui: bool = option(False, "--no-webui", help="serve only the API, without the web page at /")
    log_file: str | None = option(
        None,
        "--log-file",
        metavar="FILE",
        help="append the log of the HTTP process to this file (default: standard error)",
    )
    log_format: str = option(
        "text", "--log-format", choices=("text", "json"), help="format of the log; json: one JSON object per line"
    )
    no_log_requests: bool = option(False, "--no-log-requests", help="do not log requests")
    log_prompts: bool = option(False, "--log-prompts", help="log the prompt of each request")
    timeout: float = option(
        600.0,
        "--timeout",
        low=1,
        high=86400,
        metavar="SECONDS",
        help="end requests that make no progress for this long",
    )
    drain_timeout: float = option(
        30.0,
        "--drain-timeout",
        low=0,
        high=86400,
        metavar="SECONDS",
        help="limit for running requests to finish after SIGTERM",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_auth and (self.api_key or self.api_key_file):
            given = "--api-key" if self.api_key else f"--api-key-file {self.api_key_file}"
            raise ConfigError(f"--no-auth and {given} contradict each other: leave one out")
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not re.fullmatch(
                r"[a-z][a-z0-9+.-]*://[^/\s]+/?", origin, re.IGNORECASE
            ):
                raise ConfigError(f"--cors-origin ({origin}) must be scheme://host or scheme://host:port, or *")
        for host in self.allowed_host:
            if not re.fullmatch(r"[\w.-]+", host):
                raise ConfigError(f"--allowed-host ({host}) must be a name without port")
