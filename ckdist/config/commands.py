"""The commands that run no model themselves, or are told by a file what to do."""

from dataclasses import dataclass

from ckdist.config.engine import NAMES_HELP
from ckdist.config.options import integer, option


@dataclass(frozen=True, kw_only=True)
class CompletionCommand:
    """`ckdist completion`: print what a shell needs to complete commands and flags."""

    shell: str | None = option(None, "shell", choices=("bash", "zsh", "fish"), help="shell to write for")
    verbose: bool = option(False, "-v", "--verbose", help="log more")


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
    tensor_parallel_size: int | None = option(
        None, "-tp", "--tensor-parallel-size", parse=integer, low=1, high=1 << 16,
        help="ranks that share each replica's weights (default: as the file says, or 1)",
    )  # fmt: skip
    pipeline_parallel_size: int | None = option(
        None, "-pp", "--pipeline-parallel-size", parse=integer, low=1, high=1 << 16,
        help="stages that share each replica's layers (default: as the file says, or 1)",
    )  # fmt: skip
    data_parallel_size: int | None = option(
        None, "-dp", "--data-parallel-size", parse=integer, low=1, high=1 << 16,
        help="replicas, started on this host where no launcher has (default: as the file says, or what was started)",
    )  # fmt: skip
    verbose: bool = option(False, "-v", "--verbose", help="log more")

    @property
    def overrides(self) -> tuple[str, ...]:
        """What goes on top of the file, as `field=value`."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        sizes = {name: getattr(self, name) for name in names}
        return (*self.set, *(f"{name}={size}" for name, size in sizes.items() if size is not None))


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
