"""A model's chat template for a command that chats: rendered in a process with limits, never in its own."""

import json
from pathlib import Path
from typing import Any

from ckdist.errors import RequestError
from ckdist.tokens.chat import ChatTemplate
from ckdist.tokens.confined import Overrides
from ckdist.tokens.text_process import TOO_MUCH, TextProcess
from ckdist.tokens.tokenizer import Tokenizer

HANDLER = "ckdist.tokens.confined_template:render"


class ConfinedTemplate(ChatTemplate):
    """Its owner closes it."""

    def __init__(self, template: ChatTemplate, model: str | Path, overrides: Overrides = None):
        """`template`: the one of `model`."""
        super().__init__(template.sources, template.special_tokens)
        self._process = TextProcess(model, overrides, HANDLER)
        self.close = self._process.close

    def written(
        self,
        name: str,
        messages: list[Any],
        add_generation_prompt: bool,
        tools: list[Any] | None,
        variables: dict[str, Any],
    ) -> str:
        """As of ChatTemplate. ModelFileError for a tokenizer that does not load, EngineError if the process ended."""
        body = json.dumps([name, messages, add_generation_prompt, tools, variables])
        return self._process.ask(body.encode()).decode("utf-8", "surrogatepass")


def render(tokenizer: Tokenizer, _head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """What a worker does: the prompt as the answer's body, or the reason why there is none."""
    name, messages, add_generation_prompt, tools, variables = json.loads(body)
    template = tokenizer.chat_template
    assert template is not None, "the zygote gives every tokenizer a template"
    try:
        text = template.written(name, messages, add_generation_prompt, tools, variables)
    except RequestError as error:
        return {"refused": str(error)}, b""
    except (MemoryError, RecursionError):
        return {"refused": TOO_MUCH}, b""
    return {}, text.encode("utf-8", "surrogatepass")
