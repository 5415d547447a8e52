"""Llama 3: calls as bare JSON objects, or behind <|python_tag|> as JSON, as NAME.call(key=value, ...), or as code."""

import ast
import json

from ckdist.serve.parsers.calls import CallReader
from ckdist.serve.parsers.reader import NotAsExpected, Parsing
from ckdist.tokens.tool_format import PYTHON_TAG

CODE_TOOLS = ("code_interpreter", "python", "ipython")
MAX_CALL = 64 << 10  # characters of a call in Python


class PythonTagCallReader(CallReader):
    """Of an answer that has the tag; without it, calls are JSON objects alone in the answer."""

    @property
    def trigger(self) -> str:
        """The tag."""
        return PYTHON_TAG

    @property
    def may_be_bare(self) -> bool:
        """Yes."""
        return True

    def calls(self) -> Parsing[None]:
        """Calls behind the tag, or without it."""
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "{":
            yield from self.call()
            while (yield from self._tried(";")) or (yield from self._tried(PYTHON_TAG)):
                yield from self.call()
            return
        parts = list[str]()
        yield from self.reader.until((), parts.append)
        text = "".join(parts).strip()
        called = python_call(text)
        if called is not None and called[0] in self.types:
            name, arguments = called
        else:
            name = next((tool for tool in CODE_TOOLS if tool in self.types), "")
            arguments = {"code": text}
            if not name:
                raise NotAsExpected("a call")
        self.arguments(self.begin(name), json.dumps(arguments, ensure_ascii=False))


def python_call(text: str) -> tuple[str, dict[str, object]] | None:
    """The name and the arguments of `NAME.call(key=value, ...)` or `NAME(key=value, ...)`; None for another text."""
    try:
        node = ast.parse(text, mode="eval").body if len(text) <= MAX_CALL else None
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
        json.dumps(arguments)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    name = ast.unparse(node.func).removesuffix(".call")
    return name, arguments
