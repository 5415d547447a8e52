"""Parameters of a request's continuation. Names and meanings follow the OpenAI API, vLLM and llama-server."""

from dataclasses import dataclass, field
from functools import cached_property

from ckdist.config.samplers import DRY_BREAKERS, SAMPLERS

# vLLM's and Hugging Face's order
TEMPERATURE_FIRST: tuple[str, ...] = ("penalties", "dry", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that choose the next tokens of one sequence and its end.

    The draw at position p depends only on (seed, p) and the sequence's own tokens. So the same seed and settings give
    the same text in any batch. llama.cpp defines the fields from `typical_p` on.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens seen in prompt or output
    presence_penalty: float = 0.0  # for tokens seen in the output
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None  # None: drawn when the request is made
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # most likely alternatives per token; 0: only the chosen token; None: off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    min_tokens: int = 0  # EOS and `stop_token_ids` are not drawn before this many tokens
    typical_p: float = 1.0  # keeps the tokens with surprise nearest the entropy, up to this total probability; 1: off
    top_n_sigma: float = -1.0  # keeps logits within this many standard deviations of the largest; 0 or less: off
    xtc_probability: float = 0.0  # how often XTC is applied; 0: off
    xtc_threshold: float = 0.1  # XTC removes all but the least likely of the tokens from this on; over 0.5: off
    # logit -= multiplier * base^(n - allowed_length) if a token continues a repetition of n tokens. multiplier 0: off.
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # looks at this many last tokens of prompt and output; -1: all; 0: off
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS  # no repetition is counted across these
    # Version 1 or 2 keeps the surprise at `mirostat_tau` bits; 0: off. Penalties, DRY and temperature come before it
    # (in llama.cpp only temperature). Truncating samplers, dynatemp and `samplers` then have no effect.
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1  # learning rate
    dynatemp_range: float = 0.0  # temperature varies by this in both directions, by the entropy; 0: off
    dynatemp_exponent: float = 1.0  # exponent of the normalised entropy
    # The three penalties count this many last tokens of prompt and output; -1: all; 0: off. None: the repetition
    # penalty counts prompt and output, the other two only the output, as in the OpenAI API and vLLM.
    repeat_last_n: int | None = None
    min_keep: int = 0  # each truncating sampler leaves at least this many tokens
    # Names of SAMPLERS to apply, in this order. None: TEMPERATURE_FIRST, or the order of SAMPLERS if one of llama.cpp's
    # own (typical_p, top_n_sigma, xtc, dynatemp) is on.
    samplers: tuple[str, ...] | None = None
    # The output follows this grammar (`ckdist.tokens.grammar`) and ends with it, even with `ignore_eos`. None: free.
    grammar: str | None = None

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
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without bias and without log probabilities."""
        return (
            self.temperature == 0
            and self.dynatemp_range == 0
            and self.mirostat == 0
            and "temperature" in self.active_samplers
            and {"penalties", "dry", "typ_p", "xtc"}.isdisjoint(self.active_samplers)
            and self.logprobs is None
            and not self.logit_bias
        )
