"""Settings of every command that runs a model."""

import re
from dataclasses import dataclass

from ckdist.comm.transports.names import CHOICES, ENCRYPT
from ckdist.config.draft_config import MEMORY_SHARE, DraftFlags
from ckdist.config.options import byte_size, integer_or_auto, option, proportions
from ckdist.errors import ConfigError
from ckdist.overrides import metadata_overrides

NAMES_HELP = "smollm2, gemma3-270m, hf:owner/repo[:quant or file], or https://host/model.gguf"
MODEL_HELP = f"GGUF file, folder with safetensors, or a name: {NAMES_HELP} (default: the bundled model)"


def folder_and_size(text: str, flag: str) -> tuple[str, int | None]:
    """Parses DIR[:SIZE], the value of `flag`. Raises ConfigError if the size is wrong."""
    directory, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        directory, size = text, None
    if not directory:
        raise ConfigError(f"{flag} {text} names no folder: write DIR or DIR:SIZE, e.g. /var/cache/ckdist:100G")
    try:
        return directory, None if size is None else byte_size(size)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: the size {size} {error}") from None


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def named_adapter(text: str) -> tuple[str, str] | None:
    """Parses NAME=FOLDER. None if there is no name."""
    name, equals, folder = text.partition("=")
    return (name, folder) if equals and ADAPTER_NAME.fullmatch(name) else None


CACHE_TYPES = ("f32", "f16", "bf16", "i16", "q8_0", "q4_0")
QUANTIZE_TYPES = ("q8_0", "q4_k")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(DraftFlags):
    """Settings of every command that runs a model."""

    model: str | None = option(None, "-m", metavar="MODEL", help=MODEL_HELP)
    hf_repo: str | None = option(None, "-hf", "-hfr", metavar="OWNER/REPO[:QUANT]", help="same as -m hf:...")
    override_kv: tuple[str, ...] = option(
        (), repeat=True, metavar="KEY=TYPE:VALUE",
        help="override GGUF metadata, e.g. tokenizer.ggml.pre=str:qwen2; types: int, float, bool, str; may be "
        "repeated, or separated by commas",
    )  # fmt: skip
    ctx_size: int = option(
        0, "-c", within=(0, 1 << 24), help="longest sequence in tokens; 0: chosen from the model and the memory"
    )
    threads: int = option(0, "-t", within=(0, 4096), help="compute threads of one rank; 0: its share of the cores")
    threads_batch: int = option(0, "-tb", within=(0, 4096), help="threads for prompts; 0: same as --threads")
    batch_size: int = option(2048, "-b", within=(1, 1 << 20), help="most tokens scheduled in one step")
    ubatch_size: int = option(
        0, "-ub", within=(0, 1 << 20), help="most tokens computed at once; 0: 512, more for a mixture of many experts"
    )
    parallel: int = option(8, "-np", within=(1, 4096), help="most sequences decoded at once")
    cache_type_k: str = option(
        "i16", "-ctk", choices=CACHE_TYPES,
        help="type of the cached keys; i16: 16 bits, more precise and faster than f16",
    )  # fmt: skip
    cache_type_v: str = option("i16", "-ctv", choices=CACHE_TYPES, help="type of the cached values")
    lora: tuple[str, ...] = option(
        (), repeat=True, metavar="[NAME=]FOLDER",
        help="adapter in PEFT's format (adapter_config.json), or a GGUF file; NAME=FOLDER: for the requests that name "
        "it, may be repeated; FOLDER: for all requests",
    )  # fmt: skip
    max_loras: int = option(
        0, within=(0, 256), help="adapters at once that requests may name; 0: those of --lora NAME=FOLDER"
    )
    max_lora_rank: int = option(16, within=(1, 512), help="largest rank of an adapter that requests may name")
    quantize: str | None = option(
        None, choices=QUANTIZE_TYPES, help="quantize a safetensors model to this type while loading"
    )
    kv_memory: int | None = option(
        None, parse=byte_size, within=(1 << 16, 1 << 50), metavar="SIZE",
        help="memory for keys and values on each rank, e.g. 4G (default: half of the memory that is free after the "
        "weights, for at most 1048576 tokens or one sequence)",
    )  # fmt: skip
    memory: int | None = option(
        None, parse=byte_size, within=(1 << 20, 1 << 50), metavar="SIZE",
        help="most memory for the weights, caches and buffers of all ranks of a host (default: the free memory)",
    )  # fmt: skip
    cache_disk: str | None = option(
        None, metavar="DIR[:SIZE]",
        help="keep cached prompts in this folder, for later and after a restart; SIZE: most bytes on each host, e.g. "
        "100G (default: half of the free space)",
    )  # fmt: skip
    comm_timeout: float = option(
        8.0, within=(0.1, 86400), metavar="SECONDS",
        help="a rank that does not respond for this long within a step is lost",
    )  # fmt: skip
    transport: str = option(
        "auto", choices=CHOICES,
        help="transport between hosts (shared memory is used within a host); auto: the fastest that works",
    )  # fmt: skip
    encrypt: str = option(
        "auto", choices=ENCRYPT,
        help="encryption between hosts; auto: of tcp, while verbs and mpi are allowed and not encrypted; always: tcp "
        "alone is used; never: for closed networks",
    )  # fmt: skip
    tensor_parallel_size: int = option(
        0, "-tp", parse=integer_or_auto, within=(0, 1024),
        help="ranks that shard each layer; started on this host if there is no launcher; 0 or auto: the started "
        "ranks, or one per NUMA node",
    )  # fmt: skip
    pipeline_parallel_size: int = option(
        0, "-pp", within=(0, 1024),
        help="pipeline stages: groups of ranks that each hold consecutive layers; 1: every rank has a shard of every "
        "layer; 0: --layout chooses",
    )  # fmt: skip
    layout: str | None = option(
        None, choices=("auto",),
        help="auto: choose pipeline or tensor parallelism from the link between hosts, measured at the start (default "
        "over several hosts without -pp, -tp, --prefill or --experts)",
    )  # fmt: skip
    tensor_split: str = option(
        "even", "-ts", parse=proportions, metavar="even|auto|N,N,...",
        help="parts of the model by rank or by host; auto: by measured memory bandwidth if hosts differ, else even",
    )  # fmt: skip
    prefill: str = option(
        "auto", choices=("auto", "token", "tensor"),
        help="layout of prefill; token: ranks shard the prompt's tokens and have whole matrices; tensor: ranks shard "
        "the matrices; auto: the faster one, from prediction and measurement",
    )  # fmt: skip
    prompt_tiles: str = option(
        "auto", choices=("auto", "off"),
        help="products of quantised prompts on CPUs with AMX; auto: with weights expanded to bfloat16 tiles, 2 to 3 "
        "times as fast; off: as for generated tokens, whose cached blocks then serve prompts, too",
    )  # fmt: skip
    experts: str = option(
        "auto", choices=("auto", "tensor", "expert"),
        help="layout of experts over several hosts; tensor: shard every expert; expert: place whole experts and send "
        "rows to them; auto: the one with the lower predicted time",
    )  # fmt: skip
    repack: str = option(
        "auto", former="--reorganize", choices=("auto", "threads", "off"),
        help="threads: answer from the model's file while threads pack the weights; off: pack all weights first; auto: "
        "threads, but off with --quantize and in commands that measure",
    )  # fmt: skip
    no_keep_weights: bool = option(False, help="free the packed weights between two starts")
    trace: str | None = option(
        None, metavar="FILE.json",
        help="write a timeline of all threads and ranks, for Perfetto (ui.perfetto.dev) or chrome://tracing",
    )  # fmt: skip
    config: str | None = option(
        None, metavar="FILE.toml",
        help="read settings from this file: ctx_size = 4096; a flag wins over a variable such as CKDIST_CTX_SIZE, and "
        "that over the file",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_adapters()
        if self.has_draft_model and (self.pipeline_parallel_size > 1 or self.layout == "auto"):
            flag = (
                "--layout auto" if self.layout == "auto" else f"--pipeline-parallel-size {self.pipeline_parallel_size}"
            )
            needs = "--spec mtp" if self.spec == "mtp" else "--model-draft"
            raise ConfigError(f"{needs} needs a shard of every layer on each rank, and {flag} is given: leave one out")
        if self.model == "":
            remedy = "use a GGUF file, a folder or a name, or leave the flag out for the bundled model"
            raise ConfigError(f"--model is empty: {remedy}")
        if self.hf_repo is not None:
            if self.model is not None:
                raise ConfigError(f"--model ({self.model}) and --hf-repo ({self.hf_repo}) both name a model: give one")
            object.__setattr__(self, "model", f"hf:{self.hf_repo}")  # the rest of the code reads only `model`
            object.__setattr__(self, "hf_repo", None)
        metadata_overrides(self.override_kv)
        if self.cache_disk is not None:
            folder_and_size(self.cache_disk, "--cache-disk")
        if self.quantize and self.repack == "threads":
            raise ConfigError(
                f"--repack threads serves weights as they are stored, and --quantize {self.quantize} "
                "changes them: leave one of the two out"
            )

    @property
    def runs_model(self) -> bool:
        """True if the command has ranks of its own, each with a part of a model."""
        return True

    @property
    def own_memory(self) -> int | None:
        """--memory without the part of a draft model."""
        if self.memory is None or not self.has_draft_model:
            return self.memory
        return self.memory - self.memory // MEMORY_SHARE

    @property
    def fixed_adapter(self) -> str | None:
        """The folder of the adapter for all requests."""
        return next((text for text in self.lora if named_adapter(text) is None), None)

    @property
    def named_adapters(self) -> dict[str, str]:
        """The folders of the adapters that requests may name."""
        return dict(found for text in self.lora if (found := named_adapter(text)) is not None)

    @property
    def adapter_slots(self) -> int:
        """How many adapters requests may name at once."""
        return self.max_loras or len(self.named_adapters)

    def _check_adapters(self) -> None:
        named, fixed = self.named_adapters, self.fixed_adapter
        if len(self.lora) - len(named) - (fixed is not None):
            raise ConfigError("--lora: several are for all requests, or have one name; give each a name: NAME=FOLDER")
        if fixed is not None and self.adapter_slots:
            raise ConfigError(
                f"--lora {fixed} is for all requests, and others have names: give each a name: NAME=FOLDER"
            )
        if len(named) > self.adapter_slots:
            raise ConfigError(f"{len(named)} adapters have names, and --max-loras is {self.max_loras}: raise it")
        if missing := [text for text in (fixed, *named.values()) if text == ""]:
            raise ConfigError(f"--lora names no folder ({missing[0]!r}): write FOLDER or NAME=FOLDER")
