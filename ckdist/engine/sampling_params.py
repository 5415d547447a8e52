"""Parameters of a request's continuation. Names and meanings follow the OpenAI API, vLLM and llama-server."""

from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any

from ckdist.config.samplers import MAX_INTEGER, SAMPLERS, SamplingFields, parameter

MAX_LOGPROBS = 20  # alternatives per token
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 256
# vLLM's and Hugging Face's order
TEMPERATURE_FIRST: tuple[str, ...] = ("penalties", "dry", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingParams(SamplingFields):
    """Parameters that choose the next tokens of one sequence and its end.

    The draw at position p depends only on (seed, p) and the sequence's own tokens. So the same seed and settings give
    the same text in any batch. SamplingFields has the parameters that are flags of commands too.
    """

    max_tokens: int = parameter(16, within=(0, MAX_INTEGER))
    _: KW_ONLY
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # most likely alternatives per token; 0: only the chosen token; None: off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    # EOS and `stop_token_ids` are not drawn before this many tokens.
    min_tokens: int = parameter(0, within=(0, MAX_INTEGER))
    # Each truncating sampler leaves at least this many tokens.
    min_keep: int = parameter(0, within=(0, MAX_INTEGER), step="")
    # The output follows this grammar (`ckdist.tokens.grammar`) and ends with it, even with `ignore_eos`. None: free.
    grammar: str | None = None
    # Drafts, which change the speed alone: see DraftFlags.
    spec: str | None = None
    draft_max: int | None = None
    draft_min: int | None = None
    draft_p_min: float | None = None

    @cached_property
    def active_samplers(self) -> tuple[str, ...]:
        """The samplers that have an effect, in their order."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        active = {
            "penalties": penalties and self.repeat_last_n != 0,
            "dry": self.dry_multiplier > 0 and self.dry_penalty_last_n != 0,
            "temperature": self.temperature != 1 or self.dynatemp_range > 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p != 1,
            "top_p": self.top_p != 1,
            "min_p": self.min_p != 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
        }
        if self.mirostat:
            order = ("penalties", "dry", "temperature")
        elif self.samplers is not None:
            order = self.samplers
        else:
            own = self.dynatemp_range > 0 or active["top_n_sigma"] or active["typ_p"] or active["xtc"]
            order = SAMPLERS if own else TEMPERATURE_FIRST
        return tuple(name for name in order if active[name])

    @cached_property
    def steps(self) -> tuple[str, ...] | None:
        """The active samplers. None if TEMPERATURE_FIRST has them in this order and no other feature is on."""
        if self.mirostat or self.dynatemp_range > 0 or self.min_keep > 1:
            return self.active_samplers
        order = iter(TEMPERATURE_FIRST)
        return None if all(name in order for name in self.active_samplers) else self.active_samplers

    @cached_property
    def native_fields(self) -> dict[str, Any]:
        """The fields of a struct ckdist_sampling that are equal for all tokens, without those that are 0."""
        on = {"", *self.active_samplers, "mirostat" if self.mirostat else "dynatemp"}
        values = {
            item.metadata["native"] or item.name: getattr(self, item.name) if facet["step"] in on else facet["neutral"]
            for item in PARAMETERS
            if (facet := item.metadata)["step"] is not None
        }
        return {name: value for name, value in values.items() if value}

    @cached_property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, without bias and without log probabilities."""
        return (
            self.temperature == 0
            and self.dynatemp_range == 0
            and self.mirostat == 0
            and "temperature" in self.active_samplers
            and {"penalties", "dry", "typ_p", "xtc"}.isdisjoint(self.active_samplers)
            and self.logprobs is None
            and not self.logit_bias
        )


# The fields that `parameter` declares.
PARAMETERS = tuple(item for item in fields(SamplingParams) if "step" in item.metadata)
