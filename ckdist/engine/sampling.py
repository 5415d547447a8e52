"""What a request asks of its continuation. Names and meanings follow the OpenAI API and llama-server."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one sequence are chosen and when it ends.

    The draw at position p depends on (seed, p) alone, so the same seed and settings give the same text, whoever shares the batch.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens seen in prompt or output
    presence_penalty: float = 0.0  # of tokens seen in the output
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn when the request is made
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # this many most likely alternatives per token; 0: only the chosen one; None: none
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
