"""`ckdist plan`."""

from dataclasses import dataclass

from ckdist.config.engine_config import CACHE_TYPES, QUANTIZE_TYPES
from ckdist.config.options import Settings, option
from ckdist.errors import ConfigError

MACHINE_HELP = "machine file (.toml), `this`, or a catalogue name, e.g. epyc-9755; an unknown name lists all"

OBJECTIVES = "total", "decode", "prefill"


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Settings):
    """`ckdist plan`: predict memory and speed of a model on any machine, and compare improvements."""

    model: str | None = option(
        None,
        "-m",
        "--model",
        metavar="MODEL",
        help="GGUF file, folder, config.json, or the name of a shape, e.g. kimi-k2; an unknown name lists all",
    )
    type: str | None = option(
        None, "--type", metavar="TYPE", help="type of the matrices of a model without weights, e.g. Q4_K or BF16"
    )
    quantize: str | None = option(
        None,
        "--quantize",
        choices=QUANTIZE_TYPES,
        help="plan as if a model without quantization were loaded with --quantize",
    )
    machine: tuple[str, ...] = option(
        ("this",), "--machine", metavar="FILE|NAME", repeat=True, help=f"{MACHINE_HELP}; several are compared"
    )
    hosts: int = option(1, "--hosts", within=(1, 4096), help="number of identical hosts")
    threads: int = option(0, "-t", "--threads", within=(0, 4096), help="cores of each node; 0: all")
    context: int = option(
        0,
        "-c",
        "--ctx-size",
        "--context",
        within=(0, 1 << 30),
        help="tokens of each sequence; 0: 8192, or the model's limit if it is smaller",
    )
    sequences: int = option(
        0,
        "-np",
        "--parallel",
        "--sequences",
        within=(0, 1 << 20),
        help="sequences that are decoded at once; 0: one, and a table over 1 to 256 users",
    )
    n_prompt: int = option(2048, "-p", "--n-prompt", within=(1, 1 << 30), help="tokens of a prompt")
    n_gen: int = option(256, "-n", "--n-gen", within=(1, 1 << 30), help="tokens to generate after a prompt")
    objective: str = option(
        "total", "--objective", choices=OBJECTIVES,
        help="order of layouts and machines; total: time of a prompt and its generated tokens",
    )  # fmt: skip
    price: float = option(
        0.0, "--price", within=(0.0, 1e6), metavar="P", help="price of a host per hour; 0: that of the machine's file"
    )
    ubatch_size: int = option(512, "-ub", "--ubatch-size", within=(1, 1 << 20), help="most tokens of a step")
    cache_type_k: str = option("i16", "-ctk", "--cache-type-k", choices=CACHE_TYPES, help="type of the cached keys")
    cache_type_v: str = option("i16", "-ctv", "--cache-type-v", choices=CACHE_TYPES, help="type of the cached values")
    train: str | None = option(
        None, "--train", choices=("full", "lora"), help="plan a training; full: all weights; lora: adapters only"
    )
    batch_tokens: int = option(
        2048,
        "--batch-tokens",
        within=(1, 1 << 24),
        help="tokens of each replica in a training step, or in one of its --batches",
    )
    batches: int = option(
        1, "--batches", within=(1, 1 << 16),
        help="batches of a training step, run one after the other so that all pipeline stages have work",
    )  # fmt: skip
    json: bool = option(False, "--json", help="print one JSON object")
    plot: str | None = option(
        None,
        "--plot",
        metavar="FILE.svg",
        help="draw tokens/s by number of hosts, the roofline, and the memory of a rank",
    )
    verbose: bool = option(False, "-v", "--verbose", help="log more")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("which model? ckdist plan -m MODEL, a config.json, or the name of a shape, e.g. kimi-k2")
        if len(self.machine) > 1 and (self.train or self.plot):
            flag = "--train" if self.train else "--plot"
            raise ConfigError(f"{flag} is for one --machine, and there are {len(self.machine)}: use one")
        if self.type and self.quantize:
            raise ConfigError(
                f"--type {self.type} and --quantize {self.quantize} both set the type of matrices: use one"
            )
