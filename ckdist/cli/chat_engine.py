"""Answers from a model in this process. The cache keeps a chat's prefix, so each turn computes only its new tokens."""

from collections.abc import Iterator, Mapping, Sequence

from ckdist.cli.generate import sampling_of
from ckdist.config.chat_config import ChatConfig
from ckdist.engine.llm import LLM
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.tokenizer import Tokenizer


class EngineChat:
    """Generates answers with an engine."""

    def __init__(self, llm: LLM, tokenizer: Tokenizer, template: ChatTemplate, config: ChatConfig, name: str) -> None:
        self.name = name
        self._llm, self._config, self._sampling = llm, config, sampling_of(config)
        self._tokenizer, self._template = tokenizer, template

    def answers(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yields the next answer in pieces. Raises RequestError if the chat is longer than the context."""
        prompt = self._tokenizer.chat_tokens(messages, self._config.special_tokens_in_text, self._template)
        yield from self._llm.stream(prompt, self._sampling, stop=self._config.stop)
