"""`ckdist serve`."""

import os
import re
from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig, folder_and_size
from ckdist.config.options import byte_size, option
from ckdist.config.request_defaults import RequestDefaultFlags
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RequestDefaultFlags, EngineConfig):
    """`ckdist serve`: answer the OpenAI API over HTTP."""

    host: str = option(
        "127.0.0.1", metavar="ADDRESS[,ADDRESS]", help="addresses to listen on, with commas; unix:/path: a Unix socket"
    )
    ssl_certfile: str | None = option(
        None, metavar="FILE.pem", help="serve over TLS with this certificate and its chain"
    )
    ssl_keyfile: str | None = option(None, metavar="FILE.pem", help="private key of --ssl-certfile")
    api_prefix: str = option("", metavar="/PATH", help="path in front of all paths, e.g. /llm")
    port: int = option(8080, within=(0, 65535), help="port to listen on; 0: any free port")
    further_model: tuple[str, ...] = option(
        (), repeat=True, metavar="MODEL", facets={"after": "--model"},
        help="also serve this model, under the name of its file or folder; a second -m is the same",
    )  # fmt: skip
    models: str | None = option(
        None, metavar="FILE or FOLDER",
        help="serve the models of this TOML file, or all in this folder, each as a job of its own",
    )  # fmt: skip
    models_max: int | None = option(
        None, within=(1, 1000),
        help="most models in memory at once; the least recently used one without requests is unloaded",
    )  # fmt: skip
    models_memory: int | None = option(
        None, parse=byte_size, within=(1 << 20, 1 << 50), metavar="SIZE",
        help="most memory of all models together (default: the free memory at the start)",
    )  # fmt: skip
    keep_alive: float | None = option(
        None, within=(0, 1e9), metavar="SECONDS",
        help="unload a model that has had no request for this long (default: never)",
    )  # fmt: skip
    allow_model_changes: bool = option(
        False,
        help="with several models, clients may copy, pull and delete models with Ollama's paths: this fetches and "
        "removes files",
    )  # fmt: skip
    no_restart: bool = option(False, help="end the server if its engine ends, instead of starting the engine again")
    alias: str | None = option(
        None, "-a", metavar="NAME", help="model name in answers (default: the name of the model's file or folder)"
    )
    lora_dir: str | None = option(
        None, metavar="DIR",
        help="clients may load adapters from folders in DIR with /v1/load_lora_adapter, and unload any; needs "
        "--max-loras",
    )  # fmt: skip
    lora_uploads: int = option(
        0, parse=byte_size, within=(0, 1 << 50), metavar="SIZE",
        help="clients may upload adapters of at most SIZE bytes in all to --lora-dir (ckdist push); with "
        "--api-key-file, keys with models = true (default: none may)",
    )  # fmt: skip
    metrics_port: int | None = option(
        None, within=(0, 65535),
        help="also serve /metrics, /livez and /readyz on this port, without an API key; 0: any free port",
    )  # fmt: skip
    no_auth: bool = option(
        False, help="allow other hosts to use the server without an API key; refused without this flag"
    )
    api_key: str | None = option(
        None, metavar="KEY", secret=True,
        help="key that clients must send, or several with commas; ps shows it, so prefer CKDIST_API_KEY",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, metavar="FILE",
        help="file of mode 600 with one key per line, or one TOML table [[key]] per key; SIGHUP reloads it",
    )  # fmt: skip
    shared_cache: bool = option(False, help="reuse cached prompts across API keys; only cache_salt separates tenants")
    special_tokens_in_text: bool = option(False, help="keep control tokens in the text of messages")
    cors_origin: tuple[str, ...] = option(
        (), repeat=True, metavar="ORIGIN",
        help="allow web pages of this origin to use the server, e.g. https://chat.example:3000; *: all origins; may "
        "be repeated",
    )  # fmt: skip
    allowed_host: tuple[str, ...] = option(
        (), repeat=True, metavar="NAME",
        help="allow clients to call a server on loopback by this name, in addition to localhost and addresses; may be "
        "repeated",
    )  # fmt: skip
    prefill_file: str | None = option(
        None, metavar="FILE",
        help="compute these prompts before the first request: a text is a system prompt; a file *.jsonl has bodies of "
        "/v1/cache/prefill, one a line",
    )  # fmt: skip
    batch_dir: str | None = option(
        None, metavar="DIR[:SIZE]",
        help="folder for /v1/files and /v1/batches, and the most bytes that it may hold (default: no batches; 10G)",
    )  # fmt: skip
    store_responses: float = option(
        3600.0, within=(0, 30 * 86400), metavar="SECONDS",
        help="keep responses and conversations in memory for this long after their last use; 0: never",
    )  # fmt: skip
    slot_save_path: str | None = option(
        None, metavar="DIR",
        help="folder for /slots/{id}?action=save and restore; without --cache-disk, DIR/blocks keeps cached prompts",
    )  # fmt: skip
    max_queue: int = option(
        128, within=(0, 1 << 16), help="most waiting sequences beyond --parallel; more get HTTP 429"
    )
    max_running_per_key: int | None = option(
        None, within=(1, 1 << 31),
        help="most sequences of one API key in the engine at once; without keys: of one client address",
    )  # fmt: skip
    max_waiting_per_key: int | None = option(
        None, within=(0, 1 << 31),
        help="most sequences of one key that wait beyond --max-running-per-key; more get HTTP 429",
    )  # fmt: skip
    tokens_per_minute_per_key: int | None = option(
        None, within=(1, 1 << 31),
        help="most tokens of prompts and answers of one key within a minute; more get HTTP 429",
    )  # fmt: skip
    max_step_ms: float = option(
        200.0, within=(0, 1e6), metavar="MS",
        help="longest step with prompts while a sequence decodes; smaller: smoother streams; 0: no limit",
    )  # fmt: skip
    max_body: int = option(
        8 << 20, parse=byte_size, within=(1 << 10, 1 << 30), metavar="SIZE", help="largest request body"
    )
    pooling: str = option(
        "auto", choices=("auto", "mean", "last", "cls", "none", "rank"),
        help="pooling of hidden states into an embedding (auto: from the model's files; none: one per token; rank: a "
        "decoder answers yes or no for /v1/rerank)",
    )  # fmt: skip
    strict_fields: bool = option(False, help="refuse requests with unknown fields, instead of ignoring the fields")
    no_webui: bool = option(False, help="serve only the API, without the web page at /")
    log_file: str | None = option(
        None, metavar="FILE", help="append the log of the HTTP process to this file (default: standard error)"
    )
    log_format: str = option("text", choices=("text", "json"), help="format of the log; json: one JSON object per line")
    no_log_requests: bool = option(False, help="do not log requests")
    log_prompts: bool = option(False, help="log the prompt of each request")
    otlp_traces_endpoint: str | None = option(
        None, metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, e.g. http://127.0.0.1:4318",
    )  # fmt: skip
    timeout: float = option(
        600.0, within=(1, 86400), metavar="SECONDS", help="end requests that make no progress for this long"
    )
    stall_timeout: float = option(
        60.0, within=(1, 86400), metavar="SECONDS", help="end streams whose client reads nothing for this long"
    )
    drain_timeout: float = option(
        30.0, within=(0, 86400), metavar="SECONDS", help="limit for running requests to finish after SIGTERM"
    )

    @property
    def is_router(self) -> bool:
        """True if the HTTP process starts a job per model."""
        return self.models is not None or bool(self.further_model) or self.models_max is not None

    @property
    def runs_model(self) -> bool:
        """True if the command has ranks of its own. A router's models are jobs, each with its ranks."""
        return not self.is_router

    def __post_init__(self) -> None:
        if self.slot_save_path is not None and self.cache_disk is None:
            object.__setattr__(self, "cache_disk", f"{self.slot_save_path.rstrip('/') or '/'}/blocks")
        super().__post_init__()
        for name in (self.model, self.alias):  # clients get it as JSON
            if name is not None and name != name.encode(errors="replace").decode():
                raise ConfigError(
                    f"a server cannot name the model {name!r:.200}, which is not valid Unicode: rename it"
                )
        if self.allow_model_changes and not self.is_router:
            raise ConfigError("--allow-model-changes is for several models: give --models, or --models-max 1")
        if self.batch_dir is not None:
            folder_and_size(self.batch_dir, "--batch-dir")
        if self.lora_dir is not None and not self.adapter_slots and not self.is_router:
            raise ConfigError(f"--lora-dir {self.lora_dir} needs places for adapters: give --max-loras N")
        if self.lora_dir is not None and not os.path.isdir(self.lora_dir):  # noqa: PTH112 - the only use of a path
            raise ConfigError(f"--lora-dir {self.lora_dir} is no folder: create it, or name another")
        if self.lora_uploads and self.lora_dir is None:
            raise ConfigError("--lora-uploads needs a folder: give --lora-dir DIR and --max-loras N")
        if self.no_auth and (self.api_key or self.api_key_file):
            given = "--api-key" if self.api_key else f"--api-key-file {self.api_key_file}"
            raise ConfigError(f"--no-auth and {given} contradict each other: leave one out")
        if self.max_waiting_per_key is not None and self.max_running_per_key is None:
            given = f"--max-waiting-per-key ({self.max_waiting_per_key})"
            raise ConfigError(f"{given} needs --max-running-per-key: give both")
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.api_prefix):
            raise ConfigError(f"--api-prefix ({self.api_prefix}) must be like /llm, without a slash at its end")
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not re.fullmatch(
                r"[a-z][a-z0-9+.-]*://[^/\s]+/?", origin, re.IGNORECASE
            ):
                raise ConfigError(f"--cors-origin ({origin}) must be scheme://host or scheme://host:port, or *")
        for host in self.allowed_host:
            if not re.fullmatch(r"[\w.-]+", host):
                raise ConfigError(f"--allowed-host ({host}) must be a name without port")
