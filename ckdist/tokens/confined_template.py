"""A model's chat template for a command that chats. A process with limits renders it."""

import json
from pathlib import Path
from typing import Any

from ckdist.errors import RequestError
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.confined import Overrides
from ckdist.tokens.text_process import TOO_MUCH, TextProcess
from ckdist.tokens.tokenizer import Tokenizer

HANDLER = "ckdist.tokens.confined_template:render"


class ConfinedTemplate(ChatTemplate):
    """A chat template that a confined process renders. Its owner closes it.

    Args:
        template: The template of `model`.
    """

    def __init__(self, template: ChatTemplate, model: str | Path, overrides: Overrides = None):
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
        """Writes the prompt like ChatTemplate.

        Raises ModelFileError if the tokenizer does not load, and EngineError if the process has ended.
        """
        body = json.dumps([name, messages, add_generation_prompt, tools, variables])
        return self._process.ask(body.encode()).decode("utf-8", "surrogatepass")


def render(tokenizer: Tokenizer, _head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """The worker's handler. Returns the prompt as the body, or the reason for a refusal in the head."""
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
