"""Flags of drafts, under the names of llama-server and vLLM, too."""

from dataclasses import dataclass

from ckdist.config.options import CommandSettings, option
from ckdist.errors import ConfigError

SPECS = ("auto", "off", "ngram", "suffix", "model", "mtp")
MAX_DRAFT = 64  # tokens
MEMORY_SHARE = 4  # a draft model has 1 / MEMORY_SHARE of --memory


@dataclass(frozen=True, kw_only=True)
class DraftFlags(CommandSettings):
    """Flags of drafts."""

    spec: str = option(
        "auto", "--spec-type", "--spec", metavar="DRAFTER",
        help="draft tokens that one step verifies, with the same text: ngram (from prompt and answer), suffix (from "
        "earlier answers of the tenant, too), model (--model-draft), auto (the better one of these two), mtp (the "
        "model's own layer that predicts tokens), off",
    )  # fmt: skip
    model_draft: str | None = option(
        None, "-md", metavar="MODEL",
        help="small model that drafts tokens; it needs the same tokenizer, and every rank has a shard of it",
    )  # fmt: skip
    draft_max: int = option(
        16, "--draft", "--draft-n", "--draft-max", within=(1, MAX_DRAFT), help="most drafted tokens of a step"
    )
    draft_min: int = option(
        1, "--draft-n-min", "--draft-min", within=(0, MAX_DRAFT), help="draft nothing if fewer tokens can be guessed"
    )
    draft_p_min: float = option(
        0.0, "--draft-p-min", "--spec-draft-p-min", within=(0.0, 1.0),
        help="a draft model or the model's own layer stops at a token that it gives a smaller probability",
    )  # fmt: skip
    speculative_config: str | None = option(
        None, metavar="JSON",
        help='vLLM\'s form of --spec and --draft-max: {"method": "ngram", "num_speculative_tokens": 5}',
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spec not in SPECS:
            from ckdist.config.drafter_names import drafter_name

            try:
                object.__setattr__(self, "spec", drafter_name(self.spec))
            except ValueError as error:
                raise ConfigError(f"--spec {error}") from None
        if self.draft_min > self.draft_max:
            raise ConfigError(
                f"--draft-min ({self.draft_min}) is more than --draft-max ({self.draft_max}): lower it or raise that"
            )
        if self.speculative_config is not None:
            from ckdist.config.drafter_names import draft_flags

            for name, value in draft_flags(self.speculative_config).items():
                object.__setattr__(self, name, value)
        if self.model_draft == "":
            raise ConfigError("--model-draft is empty: name a small model, or leave the flag out")
        if self.spec == "mtp" and self.model_draft is not None:
            raise ConfigError(f"--spec mtp and --model-draft {self.model_draft} both draft: leave one out")
        if self.spec == "model" and self.model_draft is None:
            raise ConfigError("--spec model needs a small model: give --model-draft FILE, or use --spec suffix")

    @property
    def has_draft_model(self) -> bool:
        """True if a draft model, or the model's own layer, drafts tokens."""
        return self.model_draft is not None or self.spec == "mtp"
