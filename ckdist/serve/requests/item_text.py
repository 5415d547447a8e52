"""Text of history items that no chat template knows: calls of a provider's own tools, and their results."""

import json
from typing import Any

LEFT_OUT = ("type", "id", "status", "cache_control", "result")  # `result` is a generated picture


def item_text(item: dict[str, Any]) -> str:
    """Returns the item's type, and the fields that a model can read as JSON."""
    told = json.dumps(_readable({key: value for key, value in item.items() if key not in LEFT_OUT}), ensure_ascii=False)
    return f"[{item['type']} {told}]"


def _readable(value: Any) -> Any:
    """Returns `value` without encrypted fields, which only its provider can read."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if "encrypted" not in key}
    return [_readable(item) for item in value] if isinstance(value, list) else value
