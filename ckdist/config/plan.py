"""`ckdist plan`."""

from dataclasses import dataclass, fields

from ckdist.config.engine import CACHE_TYPES, QUANTIZE_TYPES
from ckdist.config.options import check_field, integer, option
from ckdist.errors import ConfigError

MACHINE_HELP = "a machine file (.toml), `this`, or one of the catalogue, as epyc-9755; a wrong name lists them"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """`ckdist plan`: whether a model fits, how fast it will be and what would help, on machines at hand or not."""

    model: str | None = option(
        None,
        "-m",
        "--model",
        metavar="MODEL",
        help="GGUF file, folder, config.json, or a shape by name, as kimi-k2; a wrong name lists them",
    )
    type: str | None = option(
        None, "--type", metavar="TYPE", help="type of the matrices of a model without weights, as Q4_K or BF16"
    )
    quantize: str | None = option(
        None, "--quantize", choices=QUANTIZE_TYPES, help="as it would be packed, of a model that is not quantised"
    )
    machine: str = option("this", "--machine", metavar="FILE|NAME", help=MACHINE_HELP)
    hosts: int = option(1, "--hosts", parse=integer, low=1, high=4096, metavar="N", help="hosts that are alike")
    threads: int = option(
        0, "-t", "--threads", parse=integer, low=0, high=4096, metavar="N", help="cores of each node; 0: all"
    )
    context: int = option(
        0,
        "-c",
        "--ctx-size",
        "--context",
        parse=integer,
        low=0,
        high=1 << 30,
        metavar="N",
        help="tokens of each sequence; 0: 8192, or what the model has",
    )
    sequences: int = option(
        1,
        "-np",
        "--parallel",
        "--sequences",
        parse=integer,
        low=1,
        high=1 << 20,
        metavar="N",
        help="sequences that decode at once",
    )
    n_prompt: int = option(
        2048, "-p", "--n-prompt", parse=integer, low=1, high=1 << 30, metavar="N", help="tokens of a prompt"
    )
    ubatch_size: int = option(
        512, "-ub", "--ubatch-size", parse=integer, low=1, high=1 << 20, metavar="N", help="most tokens of a step"
    )
    cache_type_k: str = option("i16", "-ctk", "--cache-type-k", choices=CACHE_TYPES, help="type of the cached keys")
    cache_type_v: str = option("i16", "-ctv", "--cache-type-v", choices=CACHE_TYPES, help="type of the cached values")
    train: str | None = option(
        None, "--train", choices=("full", "lora"), help="plan a training: of all weights, or of adapters alone"
    )
    batch_tokens: int = option(
        2048,
        "--batch-tokens",
        parse=integer,
        low=1,
        high=1 << 24,
        metavar="N",
        help="of a training's step, of each replica",
    )
    batches: int = option(
        1, "--batches", parse=integer, low=1, high=1 << 16, metavar="N",
        help="in which a training's step takes them, one after the other, so that all stages have work",
    )  # fmt: skip
    json: bool = option(False, "--json", help="print one JSON object")
    plot: str | None = option(
        None, "--plot", metavar="FILE.svg", help="draw tokens/s over hosts, the roofline, and memory of a rank"
    )
    verbose: bool = option(False, "-v", "--verbose", help="log more")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_field(item, getattr(self, item.name))
        if not self.model:
            raise ConfigError("which model? ckdist plan -m MODEL, a config.json, or a shape by name, as kimi-k2")
        if self.type and self.quantize:
            raise ConfigError(f"--type {self.type} and --quantize {self.quantize} both say what matrices are: give one")
