"""A jinja2 environment for chat templates, which come out of model files and are hostile input: it bounds loops, time and sizes.

jinja2's immutable sandbox keeps a template from Python's internals. What it leaves open is work without end, so here every loop
body and macro begins with a tick of a budget, what joins strings is checked before it runs, and what only pads them is taken away.
It is no memory limit on the process: a single operation may still use some dozens of MB.
"""

import json
import time
from contextvars import ContextVar
from datetime import datetime

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_VALUE = 4 << 20  # characters of a string, or elements of a list with all that it holds
MAX_TICKS = 1_000_000  # loop iterations and calls of one rendering
MAX_SECONDS = 2.0  # of one rendering
MAX_INT_BITS = 256

# Padding and formatting by a number: no chat template needs them, and one number makes gigabytes.
TAKEN_METHODS = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill", "translate"}
TAKEN_FILTERS = {"center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr"}


class Budget:
    """What one rendering may still do."""

    def __init__(self):
        self.ticks = MAX_TICKS
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self.ticks -= 1
        if self.ticks < 0:
            raise SecurityError(f"it loops and calls more than {MAX_TICKS} times")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it runs longer than {MAX_SECONDS} seconds")


_budget: ContextVar[Budget] = ContextVar("budget")  # of the rendering that runs in this thread or task


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; when rendering it is only its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What chat templates are written for: trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now`.

    A template is compiled once; each rendering through `generate` has its own `Budget`, out of the template's reach.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag], finalize=_measured)
        for name in TAKEN_FILTERS:
            del self.filters[name]
        join, replace, indent = self.filters["join"], self.filters["replace"], self.filters["indent"]
        self.filters.update(
            tojson=_tojson,
            string=lambda value: str(_measured(value)),
            concat=_concat,
            join=_keeping_marks(join, lambda context, value, d="", *rest, **more: join(context, _joinable(value, d), d, *rest, **more)),
            replace=_keeping_marks(replace, lambda context, s, old, new, *rest: replace(context, _replaceable(s, old, new), old, new, *rest)),
            indent=lambda s, width=4, first=False, blank=False: indent(s, _small(width), first, blank),
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(str(pattern)[:256])

    def generate(self, template, variables: dict):
        """The rendered text piece by piece."""
        _budget.set(Budget())
        yield from template.generate(variables)

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro))):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        _replace_concats(tree)
        return tree.set_environment(self)

    def tick(self) -> None:
        """Nothing of its own: being called is what costs."""

    def is_safe_attribute(self, obj, attr, value):
        return not _is_taken(obj, attr) and super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj, attribute):
        return self.unsafe_undefined(obj, attribute) if _is_taken(obj, attribute) else super().getattr(obj, attribute)

    def getitem(self, obj, argument):
        return self.unsafe_undefined(obj, argument) if _is_taken(obj, argument) else super().getitem(obj, argument)

    def call_binop(self, context, operator, left, right):
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context, obj, /, *args, **kwargs):
        _budget.get().tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            args = (_joinable(args[0], owner),)
        elif isinstance(owner, str) and name == "replace" and len(args) > 1:
            _replaceable(owner, *args[:2])
        return super().call(context, obj, *args, **kwargs)


def _is_taken(obj, attribute) -> bool:
    return isinstance(obj, str) and isinstance(attribute, str) and attribute in TAKEN_METHODS


def _replace_concats(tree: nodes.Node) -> None:
    """`a ~ b` is no operator that jinja2 lets us intercept, so it becomes a filter."""
    for field, value in list(tree.iter_fields()):
        if isinstance(value, nodes.Node):
            _replace_concats(value)
            setattr(tree, field, _as_filter(value))
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, nodes.Node):
                    _replace_concats(item)
            value[:] = [_as_filter(item) for item in value]


def _as_filter(node):
    if not isinstance(node, nodes.Concat):
        return node
    parts = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(parts, "concat", [], [], None, None, lineno=node.lineno)


def _keeping_marks(original, bounded):
    """`bounded` with jinja2's mark of what `original` is handed first."""
    bounded.__dict__.update(original.__dict__)
    return bounded


def _require(size: int) -> None:
    if size > MAX_VALUE:
        raise SecurityError(f"it makes a value of {size} elements or more; at most {MAX_VALUE} are allowed")


def _measured(value):
    """`value`, refused where its text would be huge: a list that holds itself many times over is small until it is printed."""
    total, open_values = 0, [value]
    while open_values:
        current = open_values.pop()
        if isinstance(current, str):
            total += len(current)
        elif isinstance(current, dict):
            total += len(current)
            open_values += [*current.keys(), *current.values()]
        elif isinstance(current, (list, tuple)):
            total += len(current)
            open_values += current
        _require(total)
    return value


def _concat(parts: list) -> str:
    _measured(parts)
    return "".join(map(str, parts))


def _joinable(values, separator) -> list:
    values = _measured(list(values))
    _require(len(values) * len(str(separator)))
    return values


def _replaceable(text, old, new):
    _require(len(str(text)) + str(text).count(str(old)) * len(str(new)))
    return text


def _small(width):
    if isinstance(width, int):
        _require(width << 16)
    return width


def _check_binop(operator: str, left, right) -> None:
    if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _require(len(left) + len(right))
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(count, int):
                _require(len(value) * count)
        if isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        raise SecurityError("it formats with %; use ~ to join strings")


def _require_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise SecurityError(f"it makes a number of {bits} bits; at most {MAX_INT_BITS} are allowed")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Plain JSON: jinja2's own would escape <, > and & for HTML.
    return json.dumps(_measured(value), ensure_ascii=ensure_ascii, indent=_small(indent), separators=separators, sort_keys=sort_keys)


def _raise_exception(message) -> None:
    raise TemplateError(str(message)[:500])
