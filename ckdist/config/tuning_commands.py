"""Settings of the commands that fine-tune without a configuration file, and that check their data."""

import re
from dataclasses import dataclass

from ckdist.comm.transports.names import ENCRYPT
from ckdist.config.commands import GGUF_TYPES
from ckdist.config.engine_config import NAMES_HELP
from ckdist.config.options import CommandSettings, changed, option
from ckdist.config.status_config import StatusConfig, check_url
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataCommand(CommandSettings):
    """`ckdist data check`: show how data files are read, and the tokens that a training would learn."""

    action: str | None = option(None, "action", choices=("check",), help="check: read the files as a training does")
    files: tuple[str, ...] = option(
        (), "files", repeat=True, metavar="FILE", help="files, patterns or folders, as train_file of a training"
    )
    model: str | None = option(None, "-m", metavar="MODEL", help=NAMES_HELP)
    samples: int = option(2, within=(0, 1000), help="sequences that are shown")
    method: str = option(
        "sft", choices=("sft", "dpo", "orpo", "kto"), help="read the records as this method of a training"
    )
    text_column: str = option("text", metavar="NAME", help="field or column that holds a text")
    max_length: int = option(
        0, within=(0, 1 << 20), help="count the tokens that a training with this max_length loses; 0: none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action is None or not self.files or self.model is None:
            raise ConfigError(
                "ckdist data needs check, the files and the model: ckdist data check chats.jsonl -m smollm2"
            )


@dataclass(frozen=True, kw_only=True)
class TuneCommand(CommandSettings):
    """`ckdist tune`: fine-tune a model on data files, without a configuration file."""

    files: tuple[str, ...] = option(
        (), "files", repeat=True, metavar="FILE", help="chats or texts: files, patterns or folders"
    )
    model: str | None = option(None, "-m", metavar="MODEL", help=NAMES_HELP)
    output: str = option("", "-o", metavar="DIR", help="folder of the result (default: MODEL-FILE in this folder)")
    full: bool = option(False, help="train all weights (default: a LoRA adapter on all linear layers)")
    method: str = option(
        "sft", choices=("sft", "dpo", "orpo", "kto", "reward", "grpo"),
        help="learn the texts and answers; from preferences: chosen and rejected (dpo, orpo), or labels (kto); to "
        "score answers (reward); or from rewards of sampled answers (grpo)",
    )  # fmt: skip
    beta: float = option(0.0, within=(0, 1e3), metavar="B", help="strength of a preference's loss (default: 0.1)")
    teacher: str = option(
        "", metavar="FILE", help="file of ckdist distill for the same data: learn the teacher's probabilities"
    )
    epochs: float = option(
        0.0, within=(0, 1e6), metavar="N", help="passes over the data (default: 3, more for little data)"
    )
    learning_rate: float = option(
        0.0, "--learning-rate", "--lr", within=(0, 1e3), metavar="RATE",
        help="peak rate (default: 2e-4, 2e-5 with --full; a tenth for preferences)",
    )  # fmt: skip
    samples: int = option(
        0, within=(0, 64), metavar="N", help="held-out prompts that are continued at each validation loss"
    )
    early_stopping: int = option(
        0, within=(0, 1 << 20), metavar="N",
        help="end after N validation losses without an improvement, ten of them an epoch; the result is the best model",
    )  # fmt: skip
    lora_r: int = option(16, "--lora-r", "--lora-rank", within=(1, 1 << 14), help="rank of the adapter's matrices")
    max_length: int = option(
        0, "--max-length", "--max-seq-length", within=(0, 1 << 20),
        help="longest sequence in tokens (default: the longest chat, if <= 2048)",
    )  # fmt: skip
    set: tuple[str, ...] = option(
        (), repeat=True, metavar="FIELD=VALUE", help="set any field of a training, e.g. weight_decay=0.1"
    )
    skip_bad: bool = option(False, help="leave out records that cannot be used, and count them")
    dry_run: bool = option(False, help="show the settings, the memory and the hours, and do not train")
    data_parallel_size: int | None = option(
        None, "-dp", within=(1, 1 << 16), help="replicas; started on this host if there is no launcher (default: 1)"
    )
    sequence_parallel_size: int = option(
        1, "-sp", within=(1, 1 << 16),
        help="ranks of each replica that divide the tokens of a sequence: for contexts that do not fit one",
    )  # fmt: skip
    rope_scaling: str = option(
        "", metavar="KIND:FACTOR",
        help="with --full: train for FACTOR times the model's context; KIND is linear, yarn or llama3",
    )  # fmt: skip
    encrypt: str = option("auto", choices=ENCRYPT, help="encryption between hosts, as of ckdist serve")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or self.model is None:
            raise ConfigError("ckdist tune needs a model and its data: ckdist tune -m smollm2 chats.jsonl")


@dataclass(frozen=True, kw_only=True)
class MergeCommand(CommandSettings):
    """`ckdist merge`: write a model with an adapter added to its weights."""

    model: str | None = option(None, "-m", metavar="MODEL", help=NAMES_HELP)
    lora: str = option("", metavar="DIR", help="the adapter's folder, or its GGUF file")
    target: str | None = option(
        None, "target", metavar="OUT", help="folder to write, or a file whose name ends in .gguf (a GGUF's only form)"
    )
    type: str = option("", choices=("", *GGUF_TYPES), help="type of the matrices (default: bf16, in a GGUF f16)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None or not self.lora or self.target is None:
            raise ConfigError(
                "ckdist merge needs a model, an adapter and a target: ckdist merge -m smollm2 --lora out/adapter m.gguf"
            )


@dataclass(frozen=True, kw_only=True)
class PushCommand(CommandSettings):
    """`ckdist push`: load an adapter into a running server, for requests that name it."""

    adapter: str | None = option(None, "adapter", metavar="ADAPTER", help="the adapter's folder, or its GGUF file")
    url: str = changed(StatusConfig, "url")
    name: str = option("", metavar="NAME", help="the name that requests give as model")
    copy_to: str | None = option(
        None, metavar="DIR",
        help="the server's --lora-dir as this host sees it: copy the adapter to DIR/NAME (default: upload it)",
    )  # fmt: skip
    replace: bool = option(False, help="replace an adapter of this name; requests that run keep theirs")
    api_key: str | None = changed(StatusConfig, "api_key")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is None or not self.name:
            raise ConfigError(
                "ckdist push needs an adapter, a server and a name: ckdist push out/adapter http://HOST:8080 --name sql"
            )
        check_url(self.url)
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", self.name):
            raise ConfigError(f"--name ({self.name:.100}) must be of letters, digits, dots, - and _")
