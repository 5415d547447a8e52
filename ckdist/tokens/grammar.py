"""Grammars of answers for llguidance: from a JSON Schema, a regular expression, a list of choices, GBNF or Lark.

A grammar is text in llguidance's own JSON, so that it can be sent to another process. Its limits are those of work, not
of time. So grammars of strangers are also checked in a process with limits, and code that follows them counts the time.
"""

import functools
import json
import math
import random
from collections.abc import Collection, Sequence
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from ckdist.errors import RequestError
from ckdist.tokens.grammar_limits import MAX_WHOLE, limits
from ckdist.tokens.schema_patterns import with_exact_patterns

MAX_GRAMMAR = 256 << 10  # characters, in llguidance's form
REMEMBERED = 16  # grammars that have passed
MAX_CHOICES = 4096
MAX_FORCED = 4096  # bytes
WALKS = (48, 48, 48, 256)  # bytes; the long one finds costs that grow with the text
MAX_ERROR = 300  # characters of llguidance's message that are shown
MAX_MULTIPLE = 100_000  # `multipleOf` without its point: llguidance's work and memory grow with it
COMBINING = "allOf", "anyOf", "oneOf", "$ref"  # a number may have to be a multiple of several `multipleOf`
MAX_NESTING = 64  # of brackets in a regular expression or a grammar
REASONS = {  # llguidance's names for why nothing can follow
    "NoExtensionBias": "no text follows it; does a rule or a $ref lead to itself alone?",
    "LexerTooComplex": "its patterns are too complex",
    "ParserTooComplex": "its rules are too complex",
}
# As Python's json.dumps writes, like most texts on which models were trained.
SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def json_schema_grammar(
    schema: dict[str, Any] | bool, lenient: bool = False, whitespace: str | None = None, field: str = "json_schema"
) -> str:
    """A grammar of JSON that validates against `schema`.

    Args:
        lenient: Ignore unknown keywords, instead of refusing them.
        whitespace: A regular expression of the text between JSON's tokens. None: as json.dumps writes.
    """
    options: Any = {**({"whitespace_pattern": whitespace} if whitespace else SEPARATORS), "lenient": lenient}
    schema = {"type": "object"} if schema is True else schema
    if not isinstance(schema, dict):
        raise RequestError(f"{field} must be a JSON Schema: an object", field, "invalid_json_schema")
    _check_size(schema, field)
    exact: dict[str, Any] = with_exact_patterns({key: value for key, value in schema.items() if key != "x-guidance"})
    return _made(lambda: LLMatcher.grammar_from_json_schema(exact, overrides=options), field)


def regex_grammar(pattern: str, field: str = "regex") -> str:
    """A grammar of text that `pattern` matches from begin to end."""
    _check_length(pattern, field)
    _check_nesting(pattern, field)
    return _made(lambda: LLMatcher.grammar_from_regex(pattern), field)


def choice_grammar(choices: Sequence[str], field: str = "choice") -> str:
    """A grammar of one of `choices`."""
    if not choices or len(choices) > MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(
            f"{field} must be a list of 1 to {MAX_CHOICES} strings that are not empty", field, "invalid_value"
        )
    _check_length("".join(choices), field)
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(quoted(choice) for choice in choices), field)


def text_grammar(text: str, field: str = "grammar") -> str:
    """A grammar in GBNF (llama.cpp's) or Lark. Its rules show which one it is."""
    _check_length(text, field)
    _check_nesting(text, field)
    return lark_grammar(_made(lambda: any_to_lark(text), field), field)


def lark_grammar(text: str, field: str = "grammar") -> str:
    """A grammar in llguidance's Lark."""
    return _made(lambda: LLMatcher.grammar_from_lark(text), field)


def quoted(text: str) -> str:
    """`text` as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def check_grammar(grammar: str, field: str = "grammar") -> None:
    """Raises RequestError if llguidance refuses the grammar, or a few texts that follow it show a problem.

    Problems are texts that take too long, and forced runs of more than MAX_FORCED bytes. A vocabulary of bytes is
    enough to find them. The check may take long, so call it in a process with limits. That process remembers the last
    grammars that have passed.
    """
    if len(grammar) > MAX_WHOLE:
        raise _too_long(len(grammar), MAX_WHOLE, field)
    _try_grammar(grammar, field)


@functools.lru_cache(maxsize=REMEMBERED)
def _try_grammar(grammar: str, field: str) -> None:
    """Raises RequestError for a grammar that does not pass. Only one that has passed is remembered."""
    vocabulary = LLTokenizer("byte", slices=[])
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise _refused(matcher.get_error(), field)
    choose = random.Random(0)
    for size in WALKS:
        _walk(matcher.deep_copy(), size, choose, field)


def _walk(matcher: LLMatcher, size: int, choose: random.Random, field: str) -> None:
    """Follows a grammar along a random text of at most `size` bytes."""
    for step in range(size):
        forced = len(matcher.compute_ff_bytes())
        if forced > MAX_FORCED:
            message = f"it forces {forced} bytes in a row; at most {MAX_FORCED} are allowed"
            raise _refused(message, field)
        allowed = int.from_bytes(matcher.compute_bitmask()[:32], "little")  # a bit for each byte
        if matcher.is_error():
            raise _refused(matcher.get_error(), field)
        found = [byte for byte, bit in enumerate(reversed(f"{allowed:0256b}")) if bit == "1"]
        if not found and step == 0 and not matcher.is_accepting():
            raise _refused("no text follows it", field)
        if not found or not matcher.consume_token(choose.choice(found)):
            return


def _made(make: Any, field: str) -> str:
    """Returns the result of `make`. Raises RequestError if it refuses, or if the grammar is too long."""
    try:
        grammar = make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic in the library is a BaseException
        raise _refused(str(error), field) from None
    if len(grammar) > MAX_GRAMMAR:
        raise _too_long(len(grammar), MAX_GRAMMAR, field)
    return grammar


def _check_size(schema: dict[str, Any], field: str) -> None:
    """Raises RequestError early for a schema of more than MAX_GRAMMAR characters as JSON, or with large multiples."""
    size, left, combines, multiples = 0, list[Any]([schema]), False, set[Decimal]()
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += [*part, *part.values()]
            combines = combines or not part.keys().isdisjoint(COMBINING)
            multiple = part.get("multipleOf")
            if isinstance(multiple, (int, float)) and multiple and -math.inf < multiple < math.inf:
                number = Decimal(multiple if isinstance(multiple, int) else repr(multiple))
                multiples.add(number)
                _check_multiples([number], field)
        elif isinstance(part, list):
            left += part
        size += 2 + (len(part) if isinstance(part, (str, dict, list)) else 1)  # no more than it has
        if size > MAX_GRAMMAR:
            raise _too_long(size, MAX_GRAMMAR, field, "more than ")
    if combines and multiples:
        _check_multiples(multiples, field)


def _check_multiples(multiples: Collection[Decimal], field: str) -> None:
    """Raises RequestError if the least common multiple of `multiples` is above MAX_MULTIPLE without its point."""
    common, parts, scale = 1, 0, 1  # the least common multiple is common / parts
    for multiple in multiples:
        numerator, denominator = multiple.as_integer_ratio()
        common, parts = math.lcm(common, numerator), math.gcd(parts, denominator)
        if common > MAX_MULTIPLE * parts:
            break  # it only grows
    while scale % parts:
        scale *= 10
    if common * scale // parts > MAX_MULTIPLE:
        what = "multipleOf is" if len(multiples) == 1 else "values of multipleOf have the least common multiple"
        number = Decimal(common) / Decimal(parts)
        message = f"{what} {str(number)[:40]}; without its point it must be at most {MAX_MULTIPLE}"
        raise RequestError(f"{field}: {message}", field, "invalid_grammar")


def _check_length(text: str, field: str) -> None:
    if len(text) > MAX_GRAMMAR:
        raise _too_long(len(text), MAX_GRAMMAR, field)


def _too_long(size: int, most: int, field: str, more: str = "") -> RequestError:
    message = f"{field} has {more}{size} characters as a grammar; at most {most} are allowed: make it simpler"
    return RequestError(message, field, "invalid_grammar")


def _check_nesting(text: str, field: str) -> None:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        if depth > MAX_NESTING:
            raise RequestError(f"{field} has brackets nested deeper than {MAX_NESTING}", field, "invalid_grammar")


def _refused(why: str, field: str) -> RequestError:
    reason = why.removeprefix("ERROR: ").partition("\n")[0].strip()
    why = REASONS.get(reason, why)
    why = " ".join(why.removeprefix("ERROR: ").split())[:MAX_ERROR] or "it is too complex"
    return RequestError(f"{field} is not a grammar that can be followed: {why}", field, "invalid_grammar")
