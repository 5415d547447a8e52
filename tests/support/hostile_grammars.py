"""Grammars and schemas that ask for much work, memory or depth, as fields of a chat request.

REFUSED are to be a 400. TAKEN are followed, or refused once following them takes too much; which of the two may depend
on how fast the machine is.
"""

import json
from typing import Any

from tests.support.answers import SCHEMAS

Fields = dict[str, Any]


def schema(given: Any) -> Fields:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


def nested(depth: int, inner: Any, wrap: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def having(*keys: str, value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(keys, value), "required": [*keys]}


def fixed(items: Any, count: int) -> dict[str, Any]:
    return {"type": "array", "minItems": count, "maxItems": count, "items": items}


DIGITS = "\n".join(f"{a}: {b} {b} {b} {b} {b} {b} {b} {b} {b} {b}" for a, b in zip("zabc", "abcd", strict=True))
CHAIN = {f"l{i}": having("a", "b", value={"$ref": f"#/$defs/l{i - 1}"}) for i in range(1, 41)}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}

REFUSED: dict[str, Fields] = {
    # counts
    "regex, counts in counts": {"guided_regex": "(a{1000}){1000}"},
    "regex, counts in counts in counts": {"guided_regex": "(((a{100}){100}){100}){100}"},
    "regex, optional before the same": {"guided_regex": "(a?){4000}a{4000}"},
    "regex, long": {"guided_regex": "[a-z]?" * 20000},
    "lark, a million of one letter": {"grammar": 'start: "a"{1000000}'},
    # what regular expressions of this kind do not know
    "regex, lookahead": {"guided_regex": "(?=a)b"},
    "regex, lookbehind": {"guided_regex": "(?<=a)b"},
    "regex, backreference": {"guided_regex": r"(a+)\1"},
    "schema, lookahead": schema({"type": "string", "pattern": "^(?=.*a)(?=.*b).*$"}),
    # depth
    "regex, deep": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "gbnf, deep": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "schema, deep": schema(nested(200, TEXT, lambda inner: having("a", value=inner))),
    # size
    "schema, giant enum": schema({"enum": [f"value {i}" for i in range(50000)]}),
    "schema, giant constant": schema({"const": "x" * 200_000}),
    "schema, exponential alternation": schema(nested(9, TEXT, lambda s: {"anyOf": [s, s, having("a", value=s)]})),
    "schema, product of alternations": schema(
        {"allOf": [{"anyOf": [having(f"k{i}", value={"const": j}) for j in range(8)]} for i in range(8)]}
    ),
    "schema, 5000 keys": schema({"type": "object", "properties": {f"k{i}": TEXT for i in range(5000)}}),
    "lark, long chain": {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(20000)) + 'a20000: "x"'},
    # circles
    "schema, itself": schema({"$ref": "#"}),
    "schema, a circle": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "schema, a circle in allOf": schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}),
    # arithmetic
    "schema, tiny multiples": schema({"type": "number", "multipleOf": 1e-30}),
    "schema, prime multiples": schema({"type": "integer", "multipleOf": 2147483647}),
    "schema, large multiples": schema({"type": "object", "properties": {"a": {"allOf": [{"multipleOf": -49999999}]}}}),
    "schema, multiples of two primes": schema(
        {"type": "number", "allOf": [{"multipleOf": 0.503}, {"multipleOf": 499}]}
    ),
    "lark, 20 windows at once": {
        "grammar": "start: A\nA: " + " & ".join(f"/(?s:.*)[{chr(97 + i)}].{{{i + 5}}}(?s:.*)/" for i in range(20))
    },
    "lark, text without a choice": {"grammar": f'start: "x" | "y" z\n{DIGITS}\nd: "0123456789"'},
}

TAKEN: dict[str, Fields] = {
    "lark, ambiguous": {"grammar": 'start: s\ns: s s | "a" | "b"'},
    "lark, more ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    "gbnf, ambiguous": {"grammar": 'root ::= root root | "a" | ""'},
    "regex, a million letters": {"guided_regex": "a{1,1000000}"},
    "regex, stars of stars": {"guided_regex": "(((a*)*)*)*b"},
    "regex, sums of sums": {"guided_regex": "(x+x+)+y"},
    "regex, a window": {"guided_regex": "(.|\n)*a(.|\n){200}"},
    "regex, windows": {"guided_regex": "(.*a.{14}.*|.*b.{13}.*|.*c.{12}.*)z"},
    "regex, classes of Unicode": {"guided_regex": r"[\p{L}\p{N}\p{S}]{1,3000}"},
    "regex, a window of classes": {"guided_regex": r"(\p{L}|\p{N})*\p{Lu}(\p{L}|\p{N}){12}"},
    "regex, 10000 words": {"guided_regex": "|".join(f"w{i * 7919 % 99991}" for i in range(10000))},
    "schema, a long text": schema({"type": "string", "maxLength": 10**9}),
    "schema, no short text": schema({"type": "string", "minLength": 10**6}),
    "schema, a long list": schema(fixed(INTEGER, 10**6)),
    "schema, lists of lists": schema(nested(5, INTEGER, lambda s: fixed(s, 100))),
    "schema, 3000 ways": schema({"oneOf": [having(f"k{i}", value=TEXT) for i in range(3000)]}),
    "schema, 800 optional keys": schema(
        {"type": "object", "properties": {f"k{i}": TEXT for i in range(800)}, "additionalProperties": False}
    ),
    "schema, in itself": schema({"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}}),
    "schema, doubled 40 times": schema({"$defs": {"l0": TEXT, **CHAIN}, "$ref": "#/$defs/l40"}),
    "schema, a window": schema({"type": "string", "pattern": "a.{300}b"}),
    "lark, windows that exclude one another": {"grammar": "start: A\nA: /.*a.{200}/ & ~/.*b.{200}/"},
    "lark, counts in counts": {"grammar": 'start: x{300}\nx: y{300}\ny: z{300}\nz: "a" | "b" z'},
    "lark, 4000 ways": {"grammar": "start: (" + " | ".join(f'"w{i}" start' for i in range(4000)) + ' | "q")'},
    "lark, 15 lexemes": {
        "grammar": "start: (" + " | ".join(f"L{i}" for i in range(15)) + ")*\n"
        + "".join(f"L{i}: /(?s:.*){chr(97 + i)}(?s:.){{{i + 9}}}/\n" for i in range(15))
    },
    "lark, pieces of a text": {
        "grammar": 'start: A\nA: %regex {"substring_chars": ' + json.dumps("abcdefghij" * 4000) + "}"
    },
    "gbnf, counts": {"grammar": 'root ::= ("a" | "aa"){0,5000}'},
    "choices, 4096": {"guided_choice": [f"{i * 7919 % 99991} " + "c" * 40 for i in range(4096)]},
    "tools, 60": {
        "tools": [{"type": "function", "function": {"name": f"t{i}", "parameters": SCHEMAS["get"]}} for i in range(60)],
        "tool_choice": "required",
    },
}  # fmt: skip
