"""What the HTTP process is told when it starts: one JSON object on its standard input, so that keys never stand in
argv.
"""

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckdist.errors import ConfigError
from ckdist.serve.api_keys import ApiKey, read_key_file

BACKLOG = 4096  # connections that wait to be accepted
LOG_FORMAT = "%(asctime)s http %(levelname)s: %(message)s"  # of this process and of those that it starts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """`endpoint` is rank 0's ROUTER; `listener` the inherited listening socket's descriptor; times are in seconds."""

    endpoint: str
    model: str
    model_name: str
    overrides: dict[str, int | float | bool | str] = field(default_factory=dict)  # of the model's metadata
    listener: int
    metrics_listener: int = -1  # descriptor of the socket of --metrics-port
    parent: int
    api_keys: tuple[ApiKey, ...] = ()  # those that are not in a file
    file_keys: tuple[ApiKey, ...] = ()  # those of `api_key_file`, which may be read again
    api_key_file: str | None = None
    shared_cache: bool = False  # keys do not tell tenants of the prefix cache apart
    special_in_text: bool = False  # control tokens may stand in the text of messages
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
        for name in ("api_keys", "file_keys"):
            values[name] = tuple(map(ApiKey.from_map, values[name]))
        return cls(**values)

    def with_current_keys(self) -> "HttpSettings":
        """These settings with the keys that their key file has now. A file that is wrong changes nothing."""
        if self.api_key_file is None:
            return self
        try:
            return replace(self, file_keys=read_key_file(self.api_key_file))
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return self
