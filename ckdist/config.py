"""What the commands can be told: one frozen dataclass per command, the single source of flags, defaults, ranges and
help.

A field carries its flags, help and range in `field(metadata=...)`, written by `option`; `ckdist.cli.arguments` turns
fields into a command line and back. Ranges are checked when a configuration is made, so Python callers get the same
errors. Nothing here looks at the machine or at a model. Flags are named as in llama-server and llama-bench where the
meaning is the same.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from ckdist.errors import ConfigError
from ckdist.overrides import metadata_overrides

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NAMES_HELP = "smollm2, gemma3-270m, or hf:owner/repo[:quant or file]"
MODEL_HELP = f"GGUF file, folder with safetensors, or a name: {NAMES_HELP} (default: the bundled model)"
CACHE_TYPES = ("f32", "f16", "bf16", "i16", "q8_0")
QUANTIZE_TYPES = ("q8_0", "q4_k")
# Under llama.cpp's names, in llama.cpp's default order.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
DRY_BREAKERS = ("\n", ":", '"', "*")
BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def integer(text: str) -> int:
    """A whole number of at most 18 digits. ValueError for all else."""
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise ValueError("is not a whole number")
    return int(text)


def real(text: str) -> float:
    """A finite number. ValueError for all else."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(value):
        raise ValueError("is not a finite number")
    return value


def byte_size(text: str) -> int:
    """`4G`, `512M`, `1.5GiB` or plain bytes; units are powers of 1024."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    if not match:
        raise ValueError("is not a size; write for example 4G or 512M")
    return int(float(match[1]) * BYTE_UNITS[match[2].upper()])


def integer_list(text: str) -> tuple[int, ...]:
    """`512,1024` as (512, 1024)."""
    return tuple(integer(part.strip()) for part in text.split(","))


def sampler_list(text: str) -> tuple[str, ...]:
    """`top_k;temperature` as ("top_k", "temperature"); empty: no sampler."""
    names = tuple(part.strip() for part in text.split(";")) if text else ()
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"has the unknown sampler '{name}'; the known ones are {', '.join(SAMPLERS)}")
    return names


def escaped(text: str) -> str:
    r"""`text` with \n, \r, \t, \", \' and \\ read as in C."""
    return re.sub(r"\\([nrt\"'\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), text)


def option(
    default: Any,
    *flags: str,
    help: str,
    parse: Callable[[str], Any] = str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    repeat: bool = False,
    secret: bool = False,
    former: str | None = None,
) -> Any:
    """A dataclass field with its flags, the last of them the long one; a name without dashes is a positional argument.

    `low` and `high` bound the value (or each of a list) and are allowed themselves. A bool field is a switch. `repeat`
    collects every use of the flag in a tuple. A `secret` does not appear in the configuration's repr. `former`: the
    flag's name in the last release, which is still understood and not shown.
    """
    metadata = {
        "flags": flags,
        "help": help,
        "parse": parse,
        "low": low,
        "high": high,
        "choices": choices,
        "metavar": metavar,
        "repeat": repeat,
        "former": former,
    }
    return field(default=default, repr=not secret, metadata=metadata)


def present_names(config_class: type["DataclassInstance"], settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with fields under their present names; what is no former name stays as it is."""
    former = {
        item.metadata["former"].lstrip("-").replace("-", "_"): item.name
        for item in fields(config_class)
        if item.metadata.get("former")
    }
    return {former.get(name, name): value for name, value in settings.items()}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What every command that runs a model can be told."""

    model: str | None = option(None, "-m", "--model", metavar="MODEL", help=MODEL_HELP)
    hf_repo: str | None = option(
        None, "-hf", "-hfr", "--hf-repo", metavar="OWNER/REPO[:QUANT]", help="the same as -m hf:..."
    )
    override_kv: tuple[str, ...] = option(
        (),
        "--override-kv",
        repeat=True,
        metavar="KEY=TYPE:VALUE",
        help=(
            "set a value of the GGUF file's metadata anew, as tokenizer.ggml.pre=str:qwen2; types: int, float, "
            "bool, str; several with commas or flags"
        ),
    )
    ctx_size: int = option(
        0,
        "-c",
        "--ctx-size",
        parse=integer,
        low=0,
        high=1 << 24,
        metavar="N",
        help="longest sequence in tokens; 0: as the model and the memory allow",
    )
    threads: int = option(
        0,
        "-t",
        "--threads",
        parse=integer,
        low=0,
        high=4096,
        metavar="N",
        help="compute threads of one rank; 0: its share of the cores",
    )
    threads_batch: int = option(
        0,
        "-tb",
        "--threads-batch",
        parse=integer,
        low=0,
        high=4096,
        metavar="N",
        help="threads for prompts; 0: as --threads",
    )
    batch_size: int = option(
        2048,
        "-b",
        "--batch-size",
        parse=integer,
        low=1,
        high=1 << 20,
        metavar="N",
        help="most tokens scheduled in one step",
    )
    ubatch_size: int = option(
        512,
        "-ub",
        "--ubatch-size",
        parse=integer,
        low=1,
        high=1 << 20,
        metavar="N",
        help="most tokens computed at once",
    )
    parallel: int = option(
        8, "-np", "--parallel", parse=integer, low=1, high=4096, metavar="N", help="most sequences decoded at once"
    )
    cache_type_k: str = option(
        "i16",
        "-ctk",
        "--cache-type-k",
        choices=CACHE_TYPES,
        help="type of the cached keys; i16: 16 bits as f16, more precise, and faster",
    )
    cache_type_v: str = option("i16", "-ctv", "--cache-type-v", choices=CACHE_TYPES, help="type of the cached values")
    lora: str | None = option(
        None,
        "--lora",
        metavar="FOLDER",
        help="adapter in PEFT's format (adapter_config.json), which is added to the model",
    )
    quantize: str | None = option(
        None, "--quantize", choices=QUANTIZE_TYPES, help="pack a safetensors model so while loading"
    )
    kv_memory: int | None = option(
        None,
        "--kv-memory",
        parse=byte_size,
        low=1 << 16,
        high=1 << 50,
        metavar="SIZE",
        help="memory for keys and values on each rank, as 4G (default: what the context needs)",
    )
    comm_timeout: float = option(
        8.0,
        "--comm-timeout",
        parse=real,
        low=0.1,
        high=86400,
        metavar="SECONDS",
        help="a rank silent for so long inside a step is lost",
    )
    transport: str = option(
        "auto",
        "--transport",
        choices=("auto", "mpi", "verbs", "tcp"),
        help="between hosts, shared memory being inside; auto: the fastest that works",
    )
    prefill: str = option(
        "auto",
        "--prefill",
        choices=("auto", "token", "tensor"),
        help=(
            "what ranks divide of a prompt: its tokens, with whole matrices, or the matrices; auto: as predicted "
            "and measured"
        ),
    )
    repack: str = option(
        "auto",
        "--repack",
        former="--reorganize",
        choices=("auto", "dsa", "threads", "off"),
        help=(
            "answer from the model's file while weights are packed, by a DSA queue or by threads; off: pack "
            "everything first"
        ),
    )
    trace: str | None = option(
        None,
        "--trace",
        metavar="FILE.json",
        help="write what every thread of every rank did, and when, for Perfetto (ui.perfetto.dev) or chrome://tracing",
    )
    verbose: bool = option(False, "-v", "--verbose", help="log more")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_field(item, getattr(self, item.name))
        if self.model == "":
            remedy = "give a GGUF file, a folder or a name, or leave the flag out for the bundled model"
            raise ConfigError(f"--model is empty: {remedy}")
        if self.hf_repo is not None:
            if self.model is not None:
                raise ConfigError(f"--model ({self.model}) and --hf-repo ({self.hf_repo}) both name a model: give one")
            object.__setattr__(self, "model", f"hf:{self.hf_repo}")  # nothing else need know of the second spelling
            object.__setattr__(self, "hf_repo", None)
        metadata_overrides(self.override_kv)
        if self.quantize and self.repack in ("dsa", "threads"):
            raise ConfigError(
                f"--repack {self.repack} serves weights as they are stored, and --quantize {self.quantize} "
                "changes them: leave one of the two out"
            )


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
    api_key: str | None = option(
        None,
        "--api-key",
        metavar="KEY",
        secret=True,
        help="key that clients must send; several are separated by commas",
    )
    api_key_file: str | None = option(None, "--api-key-file", metavar="FILE", help="file with one key per line")
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
    strict_fields: bool = option(
        False, "--strict-fields", help="refuse requests with a field that is not known, instead of ignoring it"
    )
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
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not re.fullmatch(
                r"[a-z][a-z0-9+.-]*://[^/\s]+/?", origin, re.IGNORECASE
            ):
                raise ConfigError(f"--cors-origin ({origin}) must be scheme://host or scheme://host:port, or *")
        for host in self.allowed_host:
            if not re.fullmatch(r"[\w.-]+", host):
                raise ConfigError(f"--allowed-host ({host}) must be a name without port")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(EngineConfig):
    """How tokens are sampled, and when to end."""

    n_predict: int = option(
        128, "-n", "--n-predict", parse=integer, low=0, high=1 << 24, metavar="N", help="most tokens to generate"
    )
    temperature: float = option(
        0.8, "--temp", "--temperature", parse=real, low=0, high=100, metavar="T", help="0: always the most likely token"
    )
    top_k: int = option(
        40, "--top-k", parse=integer, low=0, high=1 << 24, metavar="K", help="sample among the K most likely; 0: off"
    )
    top_p: float = option(
        0.95,
        "--top-p",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="sample among the fewest tokens with this probability in all; 1: off",
    )
    min_p: float = option(
        0.05,
        "--min-p",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="drop tokens below this share of the most likely one; 0: off",
    )
    typical_p: float = option(
        1.0,
        "--typical",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="sample among the tokens nearest to the entropy in surprise, with this probability in all; 1: off",
    )
    top_n_sigma: float = option(
        -1.0,
        "--top-nsigma",
        parse=real,
        low=-1,
        high=1000,
        metavar="N",
        help="drop logits more than N standard deviations below the largest; 0 or less: off",
    )
    xtc_probability: float = option(
        0.0,
        "--xtc-probability",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="how often the most likely tokens are excluded; 0: off",
    )
    xtc_threshold: float = option(
        0.1,
        "--xtc-threshold",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="XTC excludes tokens from this probability on but the least likely of them; above 0.5: off",
    )
    repetition_penalty: float = option(
        1.0,
        "--repeat-penalty",
        parse=real,
        low=0.01,
        high=100,
        metavar="F",
        help="divides the logits of tokens seen; 1: off",
    )
    presence_penalty: float = option(
        0.0,
        "--presence-penalty",
        parse=real,
        low=-100,
        high=100,
        metavar="F",
        help="taken from the logits of tokens seen; 0: off",
    )
    frequency_penalty: float = option(
        0.0,
        "--frequency-penalty",
        parse=real,
        low=-100,
        high=100,
        metavar="F",
        help="the same for each time that they were seen; 0: off",
    )
    repeat_last_n: int | None = option(
        None,
        "--repeat-last-n",
        parse=integer,
        low=-1,
        high=(1 << 31) - 1,
        metavar="N",
        help=(
            "last tokens of prompt and output that the penalties look at; -1: all, 0: none (default: all for "
            "--repeat-penalty, the output for the others)"
        ),
    )
    dry_multiplier: float = option(
        0.0,
        "--dry-multiplier",
        parse=real,
        low=0,
        high=1000,
        metavar="F",
        help="penalty on tokens that continue a repetition; 0: off",
    )
    dry_base: float = option(
        1.75,
        "--dry-base",
        parse=real,
        low=1,
        high=1000,
        metavar="F",
        help="by which that grows with each token of the repetition",
    )
    dry_allowed_length: int = option(
        2,
        "--dry-allowed-length",
        parse=integer,
        low=0,
        high=(1 << 31) - 1,
        metavar="N",
        help="tokens of a repetition that are not penalized",
    )
    dry_penalty_last_n: int = option(
        -1,
        "--dry-penalty-last-n",
        parse=integer,
        low=-1,
        high=(1 << 31) - 1,
        metavar="N",
        help="last tokens in which repetitions are looked for; -1: all, 0: off",
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        DRY_BREAKERS,
        "--dry-sequence-breaker",
        parse=escaped,
        repeat=True,
        metavar="TEXT",
        help=(
            r"DRY counts no repetition across this text; may be given several times, none: no text (default: \n, "
            r"colon, quote, asterisk)"
        ),
    )
    mirostat: int = option(
        0,
        "--mirostat",
        parse=integer,
        low=0,
        high=2,
        metavar="V",
        help="keep the surprise of tokens at a target, by version 1 or 2, in place of all cuts; 0: off",
    )
    mirostat_eta: float = option(
        0.1, "--mirostat-lr", parse=real, low=0, high=1, metavar="F", help="learning rate of mirostat"
    )
    mirostat_tau: float = option(
        5.0, "--mirostat-ent", parse=real, low=0, high=100, metavar="F", help="target surprise of mirostat in bits"
    )
    dynatemp_range: float = option(
        0.0,
        "--dynatemp-range",
        parse=real,
        low=0,
        high=100,
        metavar="F",
        help="temperature minus to plus this, by the entropy; 0: off",
    )
    dynatemp_exponent: float = option(
        1.0,
        "--dynatemp-exp",
        parse=real,
        low=0,
        high=100,
        metavar="F",
        help="exponent of the entropy in the dynamic temperature",
    )
    samplers: tuple[str, ...] | None = option(
        None,
        "--samplers",
        parse=sampler_list,
        metavar="A;B;C",
        help=(
            "apply these samplers, in this order: names as in llama-cli (default: penalties, dry, temperature, "
            "top_k, top_p, min_p; with --typical, --top-nsigma, --xtc-probability or --dynatemp-range, "
            "temperature comes last)"
        ),
    )
    seed: int | None = option(
        None,
        "-s",
        "--seed",
        parse=integer,
        low=0,
        high=(1 << 63) - 1,
        metavar="N",
        help="same seed, same text (default: a new one)",
    )
    stop: tuple[str, ...] = option(
        (), "--stop", repeat=True, metavar="TEXT", help="end before this text; may be given several times"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="go on after the end-of-sequence token")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """`ckdist generate`: continue one prompt on the terminal."""

    prompt: str = option("", "-p", "--prompt", metavar="TEXT", help="text to continue")
    json: bool = option(False, "--json", help="print one JSON object")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SamplingConfig):
    """`ckdist chat`: chat with a model on the terminal, over the engine or over a server."""

    n_predict: int = option(
        1024, "-n", "--n-predict", parse=integer, low=1, high=1 << 24, metavar="N", help="most tokens of an answer"
    )
    system: str | None = option(None, "--system", metavar="TEXT", help="system message, which stands before the chat")
    url: str | None = option(
        None, "--url", metavar="URL", help="chat over this server, as http://127.0.0.1:8080, and load no model here"
    )
    api_key: str | None = option(
        None, "--api-key", metavar="KEY", secret=True, help="key that the server of --url wants"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            raise ConfigError(f"--url ({self.url}) must be http://HOST:PORT or https://HOST:PORT")
        if self.url is not None and self.model is not None:
            raise ConfigError("--url and --model were both given: a server has its own model, so leave one of them out")


@dataclass(frozen=True, kw_only=True)
class CompletionCommand:
    """`ckdist completion`: print what a shell needs to complete commands and flags."""

    shell: str | None = option(None, "shell", choices=("bash", "zsh", "fish"), help="shell to write for")
    verbose: bool = option(False, "-v", "--verbose", help="log more")


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(EngineConfig):
    """`ckdist perplexity`: score a text, or save its logits."""

    file: str | None = option(None, "-f", "--file", metavar="FILE", help="text to score")
    token_ids: tuple[int, ...] | None = option(
        None,
        "--token-ids",
        parse=integer_list,
        low=0,
        high=(1 << 31) - 1,
        metavar="1,2,3",
        help="tokens to score instead of a text",
    )
    save_logits: str | None = option(
        None, "--save-logits", metavar="OUT.npy", help="write float32 logits (tokens, vocab)"
    )
    json: bool = option(False, "--json", help="print one JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) == (self.token_ids is None):
            given = "neither" if self.file is None else "both"
            raise ConfigError(f"--file or --token-ids is needed, and {given} was given")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(EngineConfig):
    """`ckdist bench`: measure a model's prefill and decode, or the machine itself."""

    target: str = option("model", "target", choices=("model", "machine", "comm"), help="what to measure")
    tune: bool = option(
        False,
        "--tune",
        help=(
            "measure anew what is kept for later runs; comm: which algorithm suits which size, model: how prefill runs"
        ),
    )
    n_prompt: tuple[int, ...] = option(
        (512,),
        "-p",
        "--n-prompt",
        parse=integer_list,
        low=0,
        high=1 << 24,
        metavar="N",
        help="prompt lengths, as 512 or 128,512; 0: none",
    )
    n_gen: tuple[int, ...] = option(
        (128,),
        "-n",
        "--n-gen",
        parse=integer_list,
        low=0,
        high=1 << 24,
        metavar="N",
        help="generated lengths, as 128 or 32,128; 0: none",
    )
    n_depth: tuple[int, ...] = option(
        (0,),
        "-d",
        "--n-depth",
        parse=integer_list,
        low=0,
        high=1 << 24,
        metavar="N",
        help="tokens of context before what is measured, as 0,8192",
    )
    n_parallel: tuple[int, ...] = option(
        (1,),
        "-npl",
        "--n-parallel",
        parse=integer_list,
        low=1,
        high=4096,
        metavar="N",
        help="sequences that generate together, as 1,4,16",
    )
    sweep: bool = option(
        False,
        "--sweep",
        help="prefill and decode over a growing context (see --ctx-size), and decode by number of threads",
    )
    repetitions: int = option(
        5, "-r", "--repetitions", parse=integer, low=1, high=10000, metavar="N", help="how often each is measured"
    )
    output: str = option("md", "-o", "--output", choices=("json", "md", "csv"), help="format of the rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == "model" and not self.sweep and not any((*self.n_prompt, *self.n_gen)):
            raise ConfigError("--n-prompt 0 and --n-gen 0 leave nothing to measure: give one of them")


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """`ckdist train`: train a model from nothing or go on with one, as a TOML file says."""

    file: str | None = option(
        None, "file", metavar="CONFIG.toml", help="the configuration; the documentation lists its fields"
    )
    set: tuple[str, ...] = option(
        (),
        "--set",
        repeat=True,
        metavar="FIELD=VALUE",
        help="a field of the configuration, as learning_rate=1e-3; may be given several times",
    )
    verbose: bool = option(False, "-v", "--verbose", help="log more")


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """`ckdist export`: write a Hugging Face folder as one GGUF file."""

    gguf: bool = option(False, "--gguf", help="the format to write; there is no other")
    type: str = option("f16", "--type", choices=("f16", "bf16", "f32", "q8_0", "q4_k"), help="type of the matrices")
    source: str | None = option(
        None, "source", metavar="IN", help="folder with config.json, safetensors and a tokenizer, or hf:owner/repo"
    )
    target: str | None = option(None, "target", metavar="OUT.gguf", help="file to write")
    verbose: bool = option(False, "-v", "--verbose", help="log more")


@dataclass(frozen=True, kw_only=True)
class PullCommand:
    """`ckdist pull`: fetch a model by its name, verify and keep it."""

    name: str | None = option(None, "name", metavar="NAME", help=NAMES_HELP)
    accept_license: bool = option(False, "--accept-license", help="accept the model's terms, whose address is shown")
    verbose: bool = option(False, "-v", "--verbose", help="log more")


@dataclass(frozen=True, kw_only=True)
class ListCommand:
    """`ckdist list`: show the models that -m can name, and which of them are here."""

    verbose: bool = option(False, "-v", "--verbose", help="log more")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """`ckdist doctor`: show this machine, what works on it, how fast it is, and what to change."""

    json: bool = option(False, "--json", help="print one JSON object")
    verbose: bool = option(False, "-v", "--verbose", help="log more")


def check_field(item: Field[Any], value: Any) -> None:
    """ConfigError when `value` is outside of what `item` (a dataclass field made by `option`) allows."""
    limits = item.metadata
    name = limits["flags"][-1]
    if value is None and item.default is None:
        return
    parts = cast("Sequence[Any]", value if isinstance(value, (tuple, list)) else (value,))
    choices, low, high = limits["choices"], limits["low"], limits["high"]
    for part in parts:
        if choices is not None and part not in choices:
            raise ConfigError(f"{name} ({part}) must be one of {', '.join(choices)}")
        if low is None and high is None:
            continue
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            raise ConfigError(f"{name} ({part!r}) must be a number")
        if not ((low is None or low <= part) and (high is None or part <= high)):
            raise ConfigError(f"{name} ({part}) must be from {low} to {high}")
