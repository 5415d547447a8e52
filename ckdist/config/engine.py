"""What every command that runs a model can be told."""

from dataclasses import dataclass, fields

from ckdist.comm.transports.names import CHOICES
from ckdist.config.options import byte_size, check_field, integer, integer_or_auto, option, real
from ckdist.errors import ConfigError
from ckdist.overrides import metadata_overrides

NAMES_HELP = "smollm2, gemma3-270m, hf:owner/repo[:quant or file], or https://host/model.gguf"


MODEL_HELP = f"GGUF file, folder with safetensors, or a name: {NAMES_HELP} (default: the bundled model)"


CACHE_TYPES = ("f32", "f16", "bf16", "i16", "q8_0")


QUANTIZE_TYPES = ("q8_0", "q4_k")


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
        choices=CHOICES,
        help="between hosts, shared memory being inside; auto: the fastest that works",
    )
    tensor_parallel_size: int = option(
        0,
        "-tp",
        "--tensor-parallel-size",
        parse=integer_or_auto,
        low=0,
        high=256,
        metavar="N",
        help=(
            "ranks that share each layer, started on this host where no launcher has; 0 or auto: those that were "
            "started, or one for each NUMA node"
        ),
    )
    pipeline_parallel_size: int = option(
        0,
        "-pp",
        "--pipeline-parallel-size",
        parse=integer,
        low=0,
        high=1024,
        metavar="N",
        help=(
            "stages that the layers are divided into, one after the other on as many groups of ranks; 1: every rank "
            "has a part of every layer; 0: as --layout chooses"
        ),
    )
    layout: str | None = option(
        None,
        "--layout",
        choices=("auto",),
        help=(
            "auto: stages, or tensors over all ranks, as is predicted to be faster on the link between hosts that is "
            "measured at the start (default over several hosts, unless -pp, -tp, --prefill or --experts says more)"
        ),
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
    experts: str = option(
        "auto",
        "--experts",
        choices=("auto", "tensor", "expert"),
        help=(
            "what several hosts divide of experts: each of them, or whole ones, to which rows go; auto: what is "
            "predicted to take less time"
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

    @property
    def runs_model(self) -> bool:
        """Whether the command has ranks of its own, each with its part of a model."""
        return True
