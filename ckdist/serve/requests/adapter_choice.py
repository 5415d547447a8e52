"""The adapter of a request: its `model`, as vLLM has it, or llama-server's `lora`."""

from collections.abc import Container, Iterable
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.problems import Problem
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.text_records import ModelFacts

OLLAMA_TAG = ":latest"  # Ollama's clients add it to names


def spellings(name: str) -> tuple[str, str]:
    """The name, and the name without Ollama's tag."""
    return name, name.removesuffix(OLLAMA_TAG)


def adapter_in(name: str, models: Iterable[str], adapters: Container[str]) -> str | None:
    """Returns the adapter that NAME or MODEL:NAME stands for, of a model with these names. None: it has no such one."""
    candidates = (name.removeprefix(prefix) for name in spellings(name) for prefix in ("", *(f"{m}:" for m in models)))
    return next((candidate for candidate in candidates if candidate in adapters), None)


def read_adapter(fields: Fields, facts: ModelFacts) -> str | None:
    """Returns the name of the request's adapter, or None.

    Raises:
        Problem: 404 for a model that the server does not have, if it has places for adapters.
        RequestError: `lora` changes a scale or names several adapters, or another one than `model`.
    """
    by_model, by_id = _by_model(fields, facts), _by_id(fields, facts)
    if by_model is not None and by_id is not None and by_model != by_id:
        raise RequestError(f"model names adapter {by_model!r}, and lora {by_id!r}: name one", "lora", "invalid_value")
    return by_id if by_model is None else by_model


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


def _by_id(fields: Fields, facts: ModelFacts) -> str | None:
    """The adapter with scale 1 in a list like [{"id": 0, "scale": 1.0}]."""
    if facts.adapters is None:  # an adapter for all requests has scale 1
        for item in fields.value("lora", list) or ():
            if not isinstance(item, dict) or item.get("scale", 1) != 1:
                raise RequestError(
                    "lora cannot change the scale of an adapter; leave it out", "lora", "unsupported_value"
                )
        return None
    names = {number: name for name, number in facts.adapters.items()}
    chosen = [_checked(item, names) for item in fields.value("lora", list) or ()]
    wanted = [name for name, scale in chosen if scale]
    if len(wanted) > 1:
        raise RequestError(f"lora names {len(wanted)} adapters, and a request has one", "lora", "unsupported_value")
    return wanted[0] if wanted else None


def _checked(item: Any, names: dict[int, str]) -> tuple[str, float]:
    if not isinstance(item, dict) or type(item.get("id")) is not int:
        raise RequestError('lora must be a list like [{"id": 0, "scale": 1.0}]', "lora", "invalid_type")
    number, scale = item["id"], item.get("scale", 1)
    if number not in names:
        known = ", ".join(f"{key} ({name})" for key, name in sorted(names.items())) or "none"
        raise Problem(404, f"there is no adapter with id {number}; loaded are {known}", "lora", "model_not_found")
    if type(scale) not in (int, float) or scale not in (0, 1):
        raise RequestError(f"the scale of an adapter is 0 or 1, not {str(scale)[:40]}", "lora", "unsupported_value")
    return names[number], scale
