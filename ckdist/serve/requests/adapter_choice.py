"""The adapters of a request: its `model`, as vLLM has it, or llama-server's `lora`."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from ckdist.engine.messages import MAX_ADAPTER_SCALE, MAX_ADAPTERS, AdapterScales
from ckdist.errors import RequestError
from ckdist.serve.problems import Problem
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.text_records import ModelFacts

OLLAMA_TAG = ":latest"  # Ollama's clients add it to names


def spellings(name: str) -> tuple[str, str]:
    """The name, and the name without Ollama's tag."""
    return name, name.removesuffix(OLLAMA_TAG)


def adapter_in(name: str, models: Iterable[str], adapters: Container[str]) -> str | None:
    """Returns the adapter that NAME or MODEL:NAME stands for, of a model with these names. None: it has no such one."""
    candidates = (name.removeprefix(prefix) for name in spellings(name) for prefix in ("", *(f"{m}:" for m in models)))
    return next((candidate for candidate in candidates if candidate in adapters), None)


def read_adapters(fields: Fields, facts: ModelFacts) -> AdapterScales | None:
    """Returns the request's adapters with their scales. None: it names none. Empty: it runs without.

    Raises:
        Problem: 404 for a model that the server does not have, if it has places for adapters.
        RequestError: `lora` lacks the adapter of `model`, or names too many, or a scale that cannot be had.
    """
    by_model, by_id = _by_model(fields, facts), _by_id(fields, facts)
    if by_model is None or by_id is None:
        return by_id if by_model is None else ((by_model, 1.0),)
    if by_model not in dict(by_id):
        others = ", ".join(repr(name) for name, _ in by_id) or "none"
        message = f"model names adapter {by_model!r}, and lora {others}: add it to lora"
        raise RequestError(message, "lora", "invalid_value")
    return by_id


def _by_model(fields: Fields, facts: ModelFacts) -> str | None:
    if facts.adapters is None:
        return None
    model = fields.text("model")
    if not model:
        return None
    names = (facts.name, *facts.aliases)
    if not set(names).isdisjoint(spellings(model)):
        return None
    if (adapter := adapter_in(model, names, facts.adapters)) is not None:
        return adapter
    known = ", ".join(repr(known) for known in (facts.name, *facts.adapters))
    raise Problem(404, f"there is no model {model[:200]!r}; this server has {known}", "model", "model_not_found")


def _by_id(fields: Fields, facts: ModelFacts) -> AdapterScales | None:
    """The adapters in a list like [{"id": 0, "scale": 1.0}]."""
    if facts.adapters is None:  # an adapter for all requests has scale 1
        for item in fields.value("lora", list) or ():
            if not isinstance(item, dict) or item.get("scale", 1) != 1:
                remedy = "start with --lora NAME=FOLDER, or leave lora out"
                message = f"the adapter for all requests has a fixed scale; {remedy}"
                raise RequestError(message, "lora", "unsupported_value")
        return None
    items = fields.value("lora", list)
    return None if items is None else chosen_adapters(items, facts.adapters)


def chosen_adapters(items: list[Any], ids: Mapping[str, int]) -> AdapterScales:
    """The adapters in llama-server's list, whose scale is not 0.

    Raises RequestError for a wrong list and for too many adapters, and Problem 404 for an unknown one.
    """
    names = {number: name for name, number in ids.items()}
    chosen = dict(_checked(item, names) for item in items)
    if len(chosen) < len(items):
        raise wrong("lora", f"has {len(items)} entries for {len(chosen)} adapters")
    wanted = tuple((name, scale) for name, scale in chosen.items() if scale)
    if len(wanted) > MAX_ADAPTERS:
        text = f"names {len(wanted)} adapters, and a request has at most {MAX_ADAPTERS}: give others the scale 0"
        raise wrong("lora", text, "unsupported_value")
    return wanted


def _checked(item: Any, names: dict[int, str]) -> tuple[str, float]:
    if not isinstance(item, dict) or type(item.get("id")) is not int:
        raise RequestError('lora must be a list like [{"id": 0, "scale": 1.0}]', "lora", "invalid_type")
    number, scale = item["id"], item.get("scale", 1)
    if number not in names:
        known = ", ".join(f"{key} ({name})" for key, name in sorted(names.items())) or "none"
        raise Problem(404, f"there is no adapter with id {number}; loaded are {known}", "lora", "model_not_found")
    if type(scale) not in (int, float) or not abs(scale) <= MAX_ADAPTER_SCALE:
        message = f"scale must be a number from -{MAX_ADAPTER_SCALE:g} to {MAX_ADAPTER_SCALE:g}, not {str(scale)[:40]}"
        raise RequestError(message, "lora", "invalid_value")
    return names[number], float(scale)
