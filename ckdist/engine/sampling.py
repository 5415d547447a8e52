"""What a request asks of its continuation. Names and meanings follow the OpenAI API, vLLM and llama-server."""

from dataclasses import dataclass, field
from functools import cached_property

from ckdist.config.samplers import DRY_BREAKERS, SAMPLERS

# vLLM's and Hugging Face's order
TEMPERATURE_FIRST: tuple[str, ...] = ("penalties", "dry", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one sequence are chosen and when it ends.

    The draw at position p depends on (seed, p) and the sequence's own tokens alone, so the same seed and settings give
    the same text, whatever else is in the batch. From `typical_p` on, llama.cpp defines the fields.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens seen in prompt or output
    presence_penalty: float = 0.0  # of tokens seen in the output
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None  # None: drawn when the request is made
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # this many most likely alternatives per token; 0: only the chosen one; None: none
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    min_tokens: int = 0  # EOS and `stop_token_ids` are not drawn before so many tokens
    typical_p: float = 1.0  # keeps the tokens nearest to the entropy in surprise, with this probability in all; 1: off
    top_n_sigma: float = -1.0  # keeps logits within so many standard deviations of the largest; 0 or less: off
    xtc_probability: float = 0.0  # how often XTC is applied; 0: off
    xtc_threshold: float = 0.1  # XTC removes tokens from this probability on but the least likely; above 0.5: off
    # A token that continues a repetition of n tokens loses multiplier base^(n - allowed_length); multiplier 0: off.
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # among so many last tokens of prompt and output; -1: all; 0: off
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS  # no repetition is counted across these
    # Version 1 or 2 keeps the surprise at `mirostat_tau` bits. Penalties, DRY and temperature come before it (in
    # llama.cpp temperature alone); the cuts, dynatemp and `samplers` do nothing then. 0: off.
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1  # learning rate
    dynatemp_range: float = 0.0  # temperature minus to plus this, by the entropy; 0: off
    dynatemp_exponent: float = 1.0  # of the normalised entropy
    # The three penalties count the last so many tokens of prompt and output; -1: all; 0: off. None: the repetition
    # penalty counts prompt and output, the other two the output, as in the OpenAI API and vLLM.
    repeat_last_n: int | None = None
    min_keep: int = 0  # each cut leaves at least so many tokens
    # Which samplers are applied, in this order (names of SAMPLERS). None: TEMPERATURE_FIRST, or the order of
    # SAMPLERS where one of llama.cpp's own (typical_p, top_n_sigma, xtc, dynatemp) is on.
    samplers: tuple[str, ...] | None = None
    # The output follows this grammar, of `ckdist.tokens.grammar`, and ends with it, `ignore_eos` or not. None: free.
    grammar: str | None = None

    @cached_property
    def active_samplers(self) -> tuple[str, ...]:
        """The samplers that do something, in the order in which they do it."""
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
        """The active samplers; None where TEMPERATURE_FIRST has them in this order and nothing else is asked for."""
        if self.mirostat or self.dynatemp_range > 0 or self.min_keep > 1:
            return self.active_samplers
        order = iter(TEMPERATURE_FIRST)
        return None if all(name in order for name in self.active_samplers) else self.active_samplers

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken as it is, and nothing is asked about it."""
        return (
            self.temperature == 0
            and self.dynatemp_range == 0
            and self.mirostat == 0
            and "temperature" in self.active_samplers
            and {"penalties", "dry", "typ_p", "xtc"}.isdisjoint(self.active_samplers)
            and self.logprobs is None
            and not self.logit_bias
        )
