"""`ckdist distill`."""

from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import option
from ckdist.errors import ConfigError

MOST_CHOICES = 1024


@dataclass(frozen=True, kw_only=True)
class DistillConfig(EngineConfig):
    """`ckdist distill`: write a teacher's log-probabilities of the tokens that a training learns."""

    files: tuple[str, ...] = option(
        (), "files", repeat=True, metavar="FILE", help="chats or texts, as train_file of the student's training"
    )
    output: str | None = option(None, "-o", "--output", metavar="OUT", help="file to write; a stopped run continues it")
    top_k: int = option(
        64, "--top-k", within=(1, MOST_CHOICES), help="most probable tokens whose log-probabilities are kept"
    )
    temperature: float = option(
        1.0, "--temperature", within=(0.05, 100), help="the logits are divided by this, here and in the student's loss"
    )
    tokenizer: str | None = option(
        None, "--tokenizer", metavar="MODEL", help="the student's tokenizer and template (default: the teacher's)"
    )
    text_column: str = option("text", "--text-column", metavar="NAME", help="field or column that holds a text")
    skip_bad: bool = option(False, "--skip-bad", help="leave out records that cannot be used, and count them")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or self.model is None or self.output is None:
            raise ConfigError(
                "ckdist distill needs data, a teacher and a file: ckdist distill chats.jsonl -m TEACHER -o teacher.kl"
            )
