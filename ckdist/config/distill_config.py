"""`ckdist distill` and `ckdist evaluate`: a model on the tokens that a training learns."""

from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import option
from ckdist.errors import ConfigError

MOST_CHOICES = 1024


@dataclass(frozen=True, kw_only=True)
class ScoredDataConfig(EngineConfig):
    """A model and data in the forms of a training."""

    files: tuple[str, ...] = option(
        (), "files", repeat=True, metavar="FILE", help="chats or texts, as train_file of a training"
    )
    tokenizer: str | None = option(
        None, metavar="MODEL", help="model whose tokenizer and template are used (default: the model's)"
    )
    text_column: str = option("text", metavar="NAME", help="field or column that holds a text")
    skip_bad: bool = option(False, help="leave out records that cannot be used, and count them")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ctx_size == 1:
            raise ConfigError("--ctx-size 1 has no room for a learned token and one before it: give at least 2")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(ScoredDataConfig):
    """`ckdist distill`: write a teacher's log-probabilities of the tokens that a training learns."""

    output: str | None = option(None, "-o", metavar="OUT", help="file to write; a stopped run continues it")
    top_k: int = option(64, within=(1, MOST_CHOICES), help="most probable tokens whose log-probabilities are kept")
    temperature: float = option(
        1.0, within=(0.05, 100), help="the logits are divided by this, here and in the student's loss"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or self.model is None or self.output is None:
            raise ConfigError(
                "ckdist distill needs data, a teacher and a file: ckdist distill chats.jsonl -m TEACHER -o teacher.kl"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(ScoredDataConfig):
    """`ckdist evaluate`: the loss of a model, as the validation loss of a training."""

    max_length: int = option(0, within=(0, 1 << 20), help="truncate chats as a training with this max_length; 0: never")
    teacher: str | None = option(
        None, metavar="FILE", help="file of ckdist distill for the same data: print the divergence, too"
    )
    json: bool = option(False, help="print one JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or self.model is None:
            raise ConfigError("ckdist evaluate needs data and a model: ckdist evaluate chats.jsonl -m smollm2")
        if self.teacher and self.max_length:
            raise ConfigError(f"--max-length ({self.max_length}) cannot be used with --teacher: leave it out")
