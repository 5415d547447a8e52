"""A request that is ready for the engine, and what preparing it needs to know of the model."""

from dataclasses import dataclass

from ckdist.engine.sampling import SamplingParams


@dataclass(frozen=True)
class ModelFacts:
    """`vocab_size` counts the rows of the embedding (a tokenizer may know fewer tokens); `context_length` is the tokens
    that a prompt and its output may have in all. With `strict_fields` a field that nobody knows is refused."""

    name: str
    vocab_size: int
    context_length: int
    strict_fields: bool = False


@dataclass(frozen=True)
class Prepared:
    """`n` choices for each of `prompts`; choice number `i` continues prompt `i // n`.

    `max_tokens` has one entry per prompt. `texts` has the prompts as text where the answer holds them; with `echo` the
    text of each choice begins with its own. `include_stop`: a stop string is given out too; `skip_special`: special
    tokens are not. `token_ids`, `timings_per_token`, `continuous_usage`: what pieces of the answer carry besides their
    text. `response_fields` are the parts of the answer that are wanted, none for all. `ignored` has names of fields
    that nobody knows.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    sampling: SamplingParams
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False
    texts: tuple[str, ...] = ()
    continuous_usage: bool = False
    include_stop: bool = False
    skip_special: bool = True
    token_ids: bool = False
    timings_per_token: bool = False
    response_fields: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def prompt_tokens(self, choice: int) -> list[int]:
        """The token ids that choice number `choice` continues."""
        return self.prompts[choice // self.n]
