"""The jinja2 environment of chat templates: functions of transformers and llama.cpp in jinja2's immutable sandbox.

The sandbox keeps a template from Python's internals. It limits neither time nor memory, so a stranger's template is
rendered in a process with limits (`ckdist.tokens.confined`).
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

GENERATION_BEGIN, GENERATION_END = "generation_begin_mark", "generation_end_mark"  # variables; training sets them


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Its body is written between two variables, which are
    empty unless training sets them.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns the body of the tag, between the variables."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (GENERATION_BEGIN, GENERATION_END))
        return [begin, *body, end]


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Has trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now` and the generation tag."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Plain JSON: jinja2's own would escape <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message)[:500])
