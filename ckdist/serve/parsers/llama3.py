"""Reads Llama 3's calls: bare JSON objects, or after <|python_tag|> JSON, NAME.call(key=value, ...) or code."""

import ast
import json

from ckdist.serve.parsers.calls import CallReader
from ckdist.serve.parsers.reader import NotAsExpected, Parsing
from ckdist.tokens.tool_format import PYTHON_TAG

CODE_TOOLS = ("code_interpreter", "python", "ipython")
MAX_CALL = 64 << 10  # characters of a call in Python


class PythonTagCallReader(CallReader):
    """Reads calls after the tag. Without the tag, a JSON object at the start of the answer is a call."""

    @property
    def trigger(self) -> str:
        """The tag before calls."""
        return PYTHON_TAG

    @property
    def may_be_bare(self) -> bool:
        """True: the tag may be missing."""
        return True

    def calls(self) -> Parsing[None]:
        """Reads calls, with or without the tag."""
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
    """Parses `NAME.call(key=value, ...)` or `NAME(key=value, ...)`.

    Returns the name and the arguments, or None for other text.
    """
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
