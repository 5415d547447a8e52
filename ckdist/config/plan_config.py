"""`ckdist plan`."""

import re
from dataclasses import dataclass

from ckdist.config.draft_config import DraftFlags
from ckdist.config.drafter_names import drafter_name
from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import CommandSettings, changed, option
from ckdist.errors import ConfigError

MACHINE_HELP = "machine file (.toml), `this`, or a catalogue name, e.g. epyc-9755; an unknown name lists all"

OPTIMIZERS = "adamw", "adamw_8bit", "adafactor", "muon", "sgd"
OBJECTIVES = "total", "decode", "prefill"


@dataclass(frozen=True, kw_only=True)
class PlanConfig(CommandSettings):
    """`ckdist plan`: predict memory and speed of a model on any machine, and compare improvements."""

    model: str | None = option(
        None, "-m", metavar="MODEL",
        help="GGUF file, folder, config.json, or the name of a shape, e.g. kimi-k2; an unknown name lists all",
    )  # fmt: skip
    type: str | None = option(
        None, metavar="TYPE", help="type of the matrices of a model without weights, e.g. Q4_K or BF16"
    )
    quantize: str | None = changed(
        EngineConfig, "quantize", help="plan as if a model without quantization were loaded with --quantize"
    )
    machine: tuple[str, ...] = option(
        ("this",), metavar="FILE|NAME", repeat=True,
        help=f"{MACHINE_HELP}; several are compared; a:2,b:1: one job over hosts that differ",
    )  # fmt: skip
    hosts: int = option(1, within=(1, 4096), help="number of identical hosts")
    threads: int = option(0, "-t", within=(0, 4096), help="cores of each node; 0: all")
    context: int = option(
        0, "-c", "--ctx-size", "--context", within=(0, 1 << 30),
        help="tokens of each sequence; 0: 8192, or the model's limit if it is smaller",
    )  # fmt: skip
    sequences: int = option(
        0, "-np", "--parallel", "--sequences", within=(0, 1 << 20),
        help="sequences that are decoded at once; 0: one, and a table over 1 to 256 users",
    )  # fmt: skip
    n_prompt: int = option(2048, "-p", within=(1, 1 << 30), help="tokens of a prompt")
    n_gen: int = option(256, "-n", within=(1, 1 << 30), help="tokens to generate after a prompt")
    objective: str = option(
        "total", choices=OBJECTIVES,
        help="order of layouts and machines; total: time of a prompt and its generated tokens",
    )  # fmt: skip
    price: float = option(
        0.0, within=(0.0, 1e6), metavar="P", help="price of a host per hour; 0: that of the machine's file"
    )
    ubatch_size: int = option(0, "-ub", within=(0, 1 << 20), help="most tokens of a step; 0: as `ckdist serve`")
    cache_type_k: str = changed(EngineConfig, "cache_type_k", help="type of the cached keys")
    cache_type_v: str = changed(EngineConfig, "cache_type_v")
    spec: str = option(
        "off", "--spec-type", "--spec", metavar="DRAFTER",
        help="predict decode with drafts, too: ngram or suffix (guesses take no time), model (--model-draft) or mtp "
        "(the model's own layer that predicts tokens)",
    )  # fmt: skip
    model_draft: str | None = changed(DraftFlags, "model_draft", help="small model that drafts tokens")
    acceptance: float = option(
        0.7, within=(0.0, 1.0), metavar="P", help="probability that a drafted token is right if those before it are"
    )
    draft_max: int = changed(DraftFlags, "draft_max")
    train: str | None = option(
        None, choices=("full", "lora"), help="plan a training; full: all weights; lora: adapters only"
    )
    optim: str = option("adamw", "--optim", choices=OPTIMIZERS, help="optimizer of a training")
    weights_dtype: str = option(
        "float32", "--weights-dtype", choices=("float32", "bfloat16"), help="type of a training's weights in memory"
    )
    zero_stage: int = option(
        1, "--zero-stage", within=(0, 3), help="data of a training that replicas shard, as zero_stage of ckdist train"
    )
    batch_tokens: int = option(
        2048, within=(1, 1 << 24), help="tokens of each replica in a training step, or in one of its --batches"
    )
    batches: int = option(
        1, within=(1, 1 << 16),
        help="batches of a training step, run one after the other so that all pipeline stages have work",
    )  # fmt: skip
    json: bool = option(False, help="print one JSON object")
    plot: str | None = option(
        None, metavar="FILE.svg", help="draw tokens/s by number of hosts, the roofline, and the memory of a rank"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("which model? ckdist plan -m MODEL, a config.json, or the name of a shape, e.g. kimi-k2")
        try:
            object.__setattr__(self, "spec", drafter_name(self.spec))
        except ValueError as error:
            raise ConfigError(f"--spec {error}") from None
        if (self.spec == "model") != (self.model_draft is not None):
            raise ConfigError("--spec model and --model-draft MODEL need each other: give both or neither")
        drafts = self.spec != "off"
        if drafts and self.train:
            raise ConfigError(f"--train has no drafts: leave --spec {self.spec} out")
        if len(self.machine) > 1 and (self.train or self.plot or drafts):
            flag = "--train" if self.train else "--plot" if self.plot else "--spec"
            raise ConfigError(f"{flag} is for one --machine, and there are {len(self.machine)}: use one")
        if self.mixes_machines and (len(self.machine) > 1 or self.train or self.plot or drafts):
            raise ConfigError("--machine a:2,b:1 is one job: it takes one --machine, and no --train, --plot or --spec")
        if self.type and self.quantize:
            raise ConfigError(
                f"--type {self.type} and --quantize {self.quantize} both set the type of matrices: use one"
            )

    @property
    def mixes_machines(self) -> bool:
        """True if --machine names machines and their numbers of hosts."""
        return any(re.search(r",|:\d+$", name) for name in self.machine)
