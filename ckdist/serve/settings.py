"""The HTTP process's settings: one JSON object on its standard input, since argv would show the keys to others."""

import json
import logging
import signal
from dataclasses import asdict, dataclass, field, replace

from ckdist.config.request_defaults import RequestDefaults
from ckdist.engine.typed_records import converted
from ckdist.errors import ConfigError
from ckdist.serve.api_keys import ApiKey, KeyLimits, read_key_file

BACKLOG = 4096  # connections that wait to be accepted
USER_ERROR = 2  # exit code of the HTTP process after a mistake of the user
ENDED_SIGNAL = signal.SIGUSR1  # tells the HTTP process that its engine has ended, and another one will listen
STALE_SECONDS = 20.0  # an engine that has been silent for this long is started again
STALE_SIGNAL = signal.SIGUSR2  # tells the process that restarts the engine that it is stuck
LOG_FORMAT = "%(asctime)s http %(levelname)s: %(message)s"  # of this process and of its children

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of one model."""

    model: str  # GGUF file or folder with the tokenizer
    model_name: str
    aliases: tuple[str, ...] = ()  # further names
    overrides: dict[str, int | float | bool | str] = field(default_factory=dict)  # of the model's metadata
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    parallel: int = 8  # sequences that run at once
    max_sequences: int = 136  # running and waiting
    adapter: str | None = None  # name of the LoRA adapter that the model was loaded with
    prefill_file: str | None = None  # prompts to compute before the first request
    slot_save_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostedSettings(ModelSettings):
    """One of several models of a server. Its engine is a job of its own."""

    words: tuple[str, ...]  # flags of its `ckdist serve`
    memory: int | None = None  # most bytes of all its ranks; None: a process predicts them before the first load
    cpus: tuple[int, ...] = ()  # CPUs of its ranks
    takes_turns: bool = False  # models without CPUs of their own run one step at a time
    pinned: bool = False  # never unloaded
    keep_alive: float | None = None  # seconds without a request after which it is unloaded; None: never
    at_start: bool = False  # loaded at the start, not by the first request
    adapters: tuple[str, ...] = ()  # names of those that are loaded with it, and that requests name


@dataclass(frozen=True, kw_only=True)
class HttpSettings(ModelSettings):
    """Settings of the HTTP process. Times are in seconds. Those named like a flag have its value (`process.FLAGS`)."""

    endpoint: str  # address of rank 0's ROUTER
    listener: int  # descriptor of the inherited listening socket
    more_listeners: tuple[int, ...] = ()  # descriptors of sockets of further addresses
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_prefix: str = ""
    metrics_listener: int = -1  # descriptor of the socket of --metrics-port
    parent: int  # process id of rank 0, or of the command that restarts it
    restarts: bool = False  # `parent` starts rank 0 again if it ends, and signals this
    api_keys: tuple[ApiKey, ...] = ()  # keys that are not in a file
    file_keys: tuple[ApiKey, ...] = ()  # keys of `api_key_file`, which may be read again
    api_key_file: str | None = None
    key_limits: KeyLimits = field(default_factory=KeyLimits)  # of clients whose key has none of its own
    batch_folder: str | None = None  # of --batch-dir
    batch_bytes: int = 0  # the most that it may hold
    store_responses: float = 0.0
    shared_cache: bool = False
    special_tokens_in_text: bool = False
    cors_origin: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None  # names that the server answers to; None: any
    max_requests: int = 648  # requests under way at once
    max_body: int = 8 << 20
    timeout: float = 600.0
    stall_timeout: float = 60.0
    drain_timeout: float = 30.0
    silence: float = 30.0  # maximum time of a connection without a request
    first_request: float = 5.0  # maximum time of a new connection without a request
    linger: float = 3.0  # time in which requests get 503 after rank 0 has died
    strict_fields: bool = False
    no_webui: bool = False
    lora_dir: str | None = None
    lora_uploads: int = 0
    cpus: tuple[int, ...] = ()  # CPUs that the host's ranks were started with
    log: int = -1  # descriptor of rank 0's standard error, for lines after rank 0's end
    heartbeat: int = -1  # descriptor of the pipe for heartbeats to rank 0; -1: none
    log_file: str | None = None
    log_format: str = "text"
    no_log_requests: bool = False
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
    verbose: bool = False
    models: tuple[HostedSettings, ...] = ()  # if there are several; `endpoint` and `model` are empty then
    pulled: HostedSettings | None = None  # of models that clients pull, without name and path; None: they may not
    allow_model_changes: bool = False
    models_max: int | None = None
    models_memory: int = 0  # most bytes of all models together

    def to_json(self) -> bytes:
        """Returns the settings for the HTTP process's standard input."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "HttpSettings":
        """Inverse of `to_json`."""
        return converted(cls, json.loads(data))

    def with_current_keys(self) -> "HttpSettings":
        """Returns the settings with the current keys of the key file. A wrong file changes nothing."""
        if self.api_key_file is None:
            return self
        try:
            return replace(self, file_keys=read_key_file(self.api_key_file))
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return self
