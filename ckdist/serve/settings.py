"""What the HTTP process is told when it starts: one JSON object on its standard input, so that keys never stand in
argv.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ckdist.config.serve import ServeConfig
from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file

BACKLOG = 4096  # connections that wait to be accepted
LOG_FORMAT = "%(asctime)s http %(levelname)s: %(message)s"  # of this process and of those that it starts
MAX_KEYS = 1000
MAX_KEY_FILE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """`endpoint` is rank 0's ROUTER; `listener` the inherited listening socket's descriptor; times are in seconds."""

    endpoint: str
    model: str
    model_name: str
    overrides: dict[str, int | float | bool | str] = field(default_factory=dict)  # of the model's metadata
    listener: int
    parent: int
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()  # whose web pages may use the server
    allowed_hosts: tuple[str, ...] | None = None  # names it answers to; None: any
    parallel: int = 8  # sequences that run at once
    max_sequences: int = 136  # running and waiting
    max_requests: int = 648  # under way at once
    max_body: int = 8 << 20
    timeout: float = 600.0
    drain_timeout: float = 30.0
    silence: float = 30.0  # how long a connection may be without a request
    first_request: float = 5.0  # how long a new one may be
    linger: float = 3.0  # how long 503 is answered after rank 0 has died
    strict_fields: bool = False
    webui: bool = True  # the page at /
    adapter: str | None = None  # name of the LoRA adapter that the model was loaded with
    cpus: tuple[int, ...] = ()  # that the host's ranks were started with
    log: int = -1  # descriptor of rank 0's standard error, for lines after rank 0's end
    heartbeat: int = -1  # descriptor of the pipe on which rank 0 hears that this process lives; -1: it does not listen
    log_file: str | None = None
    log_format: str = "text"
    log_requests: bool = True
    log_prompts: bool = False
    verbose: bool = False

    def to_json(self) -> bytes:
        """The settings for standard input of the HTTP process."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "HttpSettings":
        """The way back of `to_json`."""
        given: dict[str, Any] = json.loads(data)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        return cls(**values)


def read_api_keys(config: ServeConfig) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file; ConfigError when a file cannot be read or holds no key."""
    keys = [key.strip() for key in (config.api_key or "").split(",")]
    if config.api_key is not None and not any(keys):
        raise ConfigError("--api-key is empty; give a key, or leave the flag out")
    if config.api_key_file is not None:
        lines = [
            line.strip()
            for line in read_text_file(
                config.api_key_file, f"--api-key-file {config.api_key_file}", MAX_KEY_FILE_BYTES
            ).splitlines()
        ]
        if not any(lines):
            raise ConfigError(f"--api-key-file ({config.api_key_file}) holds no key; write one per line")
        keys += lines
    keys = [key for key in keys if key]
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{len(keys)} API keys were given; at most {MAX_KEYS} are allowed")
    return tuple(keys)
