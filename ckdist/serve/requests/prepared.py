"""A request that is ready for the engine, and what preparing it needs to know of the model."""

from dataclasses import dataclass

from ckdist.engine.sampling import SamplingParams


@dataclass(frozen=True)
class ModelFacts:
    """`vocab_size` counts the rows of the embedding (a tokenizer may know fewer tokens); `context_length` is the tokens that a
    prompt and its output may have in all."""

    name: str
    vocab_size: int
    context_length: int


@dataclass(frozen=True)
class Prepared:
    """`n` choices for each of `prompts`; choice number `i` continues prompt `i // n`.

    `max_tokens` has one entry per prompt. `echo` holds the prompts' texts where answers begin with them, else None.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    sampling: SamplingParams
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: list[str] | None = None
