"""Reads the structure that the answer must have, as one grammar.

The fields are OpenAI's response_format, vLLM's guided_* and structured_outputs, llama-server's grammar and json_schema,
and Ollama's format.
"""

import json
from collections.abc import Callable

from ckdist.errors import RequestError
from ckdist.serve.requests.field_table import RULES
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.tokens.chat_input import kind_of
from ckdist.tokens.grammar import check_grammar, choice_grammar, json_schema_grammar, regex_grammar, text_grammar

OBJECT = {"type": "object"}


def read_structure(fields: Fields) -> str | None:
    """Returns the request's grammar, checked; None if it has none.

    Raises RequestError for a grammar that is wrong or too complex, and if there are several.
    """
    whitespace = fields.text("guided_whitespace_pattern") or None
    found = {
        "response_format": _response_format(fields),
        "json_schema": _schema(fields, "json_schema"),
        "grammar": _text(fields, "grammar", text_grammar),
        "guided_json": _schema(fields, "guided_json", whitespace),
        "guided_regex": _text(fields, "guided_regex", regex_grammar),
        "guided_choice": _choices(fields, "guided_choice"),
        "guided_grammar": _text(fields, "guided_grammar", text_grammar),
        "structured_outputs": _structured_outputs(fields),
        "format": _ollama_format(fields),
    }
    given = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(given) > 1:
        message = f"{' and '.join(given)} each define the structure of the answer; give one"
        raise RequestError(message, list(given)[1], "invalid_value")
    for name, grammar in given.items():
        check_grammar(grammar, name)
        return grammar
    return None


def _response_format(fields: Fields) -> str | None:
    field, form = "response_format", fields.value("response_format", dict)
    if form is None:
        return None
    own = Fields(form, field)
    kind = own.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_schema_grammar(own.value("schema", dict) or OBJECT, field=field)
    if kind == "json_schema":
        inner = own.inner("json_schema")
        schema = (own if own.value("json_schema", dict) is None else inner).value("schema", dict, bool)
        if schema is None:
            message = "response_format.json_schema.schema is needed: a JSON Schema"
            raise RequestError(message, field, "invalid_json_schema")
        return json_schema_grammar(schema, lenient=not inner.switch("strict"), field=field)
    if kind in ("regex", "grammar"):
        text = own.text(kind) or own.text("value") or own.text("pattern")
        if not text:
            raise RequestError(f"response_format.{kind} is needed: a string", field, "invalid_value")
        return regex_grammar(text, field) if kind == "regex" else text_grammar(text, field)
    text = f"of type {kind[:32]!r} is not supported; known are text, json_object, json_schema"
    raise wrong(field, text, "unsupported_value")


def _structured_outputs(fields: Fields) -> str | None:
    """Reads vLLM's object. Each of its fields is another form of constraint."""
    field, own = "structured_outputs", fields.inner("structured_outputs")
    unknown = next((name for name in own.body if f"{field}.{name}" not in RULES["chat"]), None)
    if unknown is not None:  # a misspelled constraint must not be ignored
        raise RequestError(f"unknown field {f'{field}.{unknown[:64]}'!r}", field, "unknown_parameter")
    whitespace = own.text("whitespace_pattern") or None
    found = [
        _schema(own, "json", whitespace),
        _text(own, "regex", regex_grammar),
        _choices(own, "choice"),
        _text(own, "grammar", text_grammar),
        json_schema_grammar(OBJECT, whitespace=whitespace, field=field) if own.switch("json_object") else None,
    ]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise RequestError("structured_outputs has several forms; give one", field, "invalid_value")
    return grammars[0] if grammars else None


def _ollama_format(fields: Fields) -> str | None:
    given = fields.value("format", str, dict)
    if not given:
        return None
    if isinstance(given, str) and given != "json":
        raise RequestError(f"format ({given[:32]!r}) must be 'json' or a JSON Schema", "format", "unsupported_value")
    return json_schema_grammar(OBJECT if isinstance(given, str) else given, lenient=True, field="format")


def _schema(fields: Fields, name: str, whitespace: str | None = None) -> str | None:
    """Reads a JSON Schema, as an object or as JSON text."""
    given = fields.value(name, dict, str, bool)
    if given is None or given == "":
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise wrong(name, "is a string that is not JSON", "invalid_json_schema") from None
        if not isinstance(given, (dict, bool)):
            raise wrong(name, f"must be a JSON Schema, not {kind_of(given)}", "invalid_json_schema")
    return json_schema_grammar(given, whitespace=whitespace, field=name)


def _text(fields: Fields, name: str, make: Callable[[str, str], str]) -> str | None:
    given = fields.text(name)
    return make(given, name) if given else None


def _choices(fields: Fields, name: str) -> str | None:
    given = fields.value(name, list)
    return choice_grammar(given, name) if given else None
