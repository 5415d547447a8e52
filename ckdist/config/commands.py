"""Settings of the commands that run no model themselves, or that read a TOML file."""

from dataclasses import dataclass

from ckdist.config.engine_config import NAMES_HELP
from ckdist.config.options import CommandSettings, byte_size, option
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CompletionCommand(CommandSettings):
    """`ckdist completion`: print a completion script for a shell."""

    shell: str | None = option(None, "shell", choices=("bash", "zsh", "fish"), help="shell that runs the script")


@dataclass(frozen=True, kw_only=True)
class CacheCommand(CommandSettings):
    """`ckdist cache`: show, check or shrink the prompts that --cache-disk has kept."""

    action: str | None = option(
        None, "action", choices=("list", "verify", "prune"),
        help="list: show the folders; verify: read everything and compare checksums; prune: remove old entries",
    )  # fmt: skip
    directory: str | None = option(None, "directory", metavar="DIR", help="the folder of --cache-disk")
    size: int | None = option(
        None, parse=byte_size, within=(0, 1 << 50), metavar="SIZE",
        help="prune: most bytes that stay, e.g. 10G; folders and prompts that were not used for the longest time go",
    )  # fmt: skip
    days: float | None = option(
        None, within=(0, 1e6), metavar="N", help="prune: remove folders that have not changed for N days"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action is None or self.directory is None:
            raise ConfigError("ckdist cache needs list, verify or prune, and the folder: ckdist cache list DIR")
        is_limited = self.size is not None or self.days is not None
        if (self.action == "prune") != is_limited:
            raise ConfigError(
                "--size and --days are for prune, which needs one of them: ckdist cache prune DIR --size 10G"
            )


@dataclass(frozen=True, kw_only=True)
class TrainCommand(CommandSettings):
    """`ckdist train`: train a model from scratch or fine-tune one, as configured in a TOML file."""

    file: str | None = option(
        None, "file", metavar="CONFIG.toml", help="the configuration; the documentation lists its fields"
    )
    set: tuple[str, ...] = option(
        (), repeat=True, metavar="FIELD=VALUE",
        help="override a field of the configuration, e.g. learning_rate=1e-3; may be repeated",
    )  # fmt: skip
    tensor_parallel_size: int | None = option(
        None, "-tp", within=(1, 1 << 16),
        help="ranks that shard the tensors of each replica (default: the file's value, or 1)",
    )  # fmt: skip
    pipeline_parallel_size: int | None = option(
        None, "-pp", within=(1, 1 << 16), help="pipeline stages of each replica (default: the file's value, or 1)"
    )
    sequence_parallel_size: int | None = option(
        None, "-sp", within=(1, 1 << 16),
        help="ranks that divide the tokens of each sequence of a replica (default: the file's value, or 1)",
    )  # fmt: skip
    data_parallel_size: int | None = option(
        None, "-dp", within=(1, 1 << 16),
        help="replicas; started on this host if there is no launcher (default: the file's value, or the started ranks)",
    )  # fmt: skip
    trace: str | None = option(
        None, metavar="FILE.json", help="write the newest events of every thread of every rank, for Perfetto"
    )

    @property
    def overrides(self) -> tuple[str, ...]:
        """The fields that override the file, as `field=value`."""
        kinds = "tensor", "pipeline", "sequence", "data"
        sizes = {f"{kind}_parallel_size": getattr(self, f"{kind}_parallel_size") for kind in kinds}
        values = sizes | {"trace": self.trace}
        return (*self.set, *(f"{name}={value}" for name, value in values.items() if value is not None))


GGUF_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_k")


@dataclass(frozen=True, kw_only=True)
class ExportCommand(CommandSettings):
    """`ckdist export`: write a Hugging Face folder, or an adapter, as one GGUF file."""

    gguf: bool = option(False, help="write GGUF, the only format")
    type: str = option("f16", choices=GGUF_TYPES, help="type of the matrices")
    source: str | None = option(
        None, "source", metavar="IN", help="folder with config.json, safetensors and a tokenizer, or hf:owner/repo"
    )
    lora: str = option("", metavar="DIR", help="write only this adapter; its base IN may be a GGUF too")
    target: str | None = option(None, "target", metavar="OUT.gguf", help="file to write")


@dataclass(frozen=True, kw_only=True)
class PullCommand(CommandSettings):
    """`ckdist pull`: fetch a model by its name, verify it and store it."""

    name: str | None = option(None, "name", metavar="NAME", help=NAMES_HELP)
    accept_license: bool = option(False, help="accept the model's terms; the error without this flag shows them")


@dataclass(frozen=True, kw_only=True)
class ListCommand(CommandSettings):
    """`ckdist list`: show the models that -m can name, and those already fetched."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(CommandSettings):
    """`ckdist doctor`: show this machine, the features that work on it, its speed, and advice."""

    json: bool = option(False, help="print one JSON object")
