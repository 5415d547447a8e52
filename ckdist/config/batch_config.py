"""`ckdist batch`."""

from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import changed, option
from ckdist.errors import ConfigError

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class BatchConfig(EngineConfig):
    """`ckdist batch`: answer a file of requests, and continue where it stopped."""

    input: str | None = option(
        None, "-i", metavar="IN.jsonl", help="requests as in OpenAI's batches: custom_id, url and body on each line"
    )
    output: str | None = option(None, "-o", metavar="OUT.jsonl", help="answers; those there are kept")
    errors: str | None = option(None, metavar="FILE.jsonl", help="requests that failed (default: OUT.errors.jsonl)")
    endpoint: str | None = option(None, metavar="PATH", help="url of lines without one, e.g. /v1/chat/completions")
    parallel: int = changed(EngineConfig, "parallel", default=16)
    max_tokens_default: int | None = option(
        None, "-n", "--max-tokens", within=(1, 1 << 24), help="most tokens of answers without a limit"
    )
    logprobs: int | None = option(
        None, within=(0, MAX_LOGPROBS), metavar="K",
        help="write each token's log-probability, and those of the K most likely ones, to OUT.logprobs, as rows of a "
        "fixed size",
    )  # fmt: skip
    strict_fields: bool = option(False, help="refuse lines with unknown fields")
    pooling: str = option(
        "auto", choices=("auto", "mean", "last", "cls"), help="pooling of hidden states into an embedding"
    )
    check: bool = option(False, help="only check the lines")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input is None or (self.output is None and not self.check):
            raise ConfigError("ckdist batch needs -i IN.jsonl and -o OUT.jsonl")
