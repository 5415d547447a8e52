"""`ckdist perplexity`."""

from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import integer_list, option
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(EngineConfig):
    """`ckdist perplexity`: score a text, or save its logits."""

    file: str | None = option(None, "-f", metavar="FILE", help="text to score")
    token_ids: tuple[int, ...] | None = option(
        None, parse=integer_list, within=(0, (1 << 31) - 1), metavar="1,2,3",
        help="token ids to score instead of a text",
    )  # fmt: skip
    save_logits: str | None = option(None, metavar="OUT.npy", help="write float32 logits (tokens, vocab)")
    json: bool = option(False, help="print one JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) == (self.token_ids is None):
            given = "neither" if self.file is None else "both"
            raise ConfigError(f"--file or --token-ids is needed, but {given} was given")
