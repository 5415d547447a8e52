"""Items of a history that no chat template knows, as text: calls of a provider's own tools, and their results."""

import json
from typing import Any

LEFT_OUT = ("type", "id", "status", "cache_control", "result")  # `result` is a picture that was made


def item_text(item: dict[str, Any]) -> str:
    """Its type, and as JSON whatever a model can read of it."""
    told = json.dumps(_readable({key: value for key, value in item.items() if key not in LEFT_OUT}), ensure_ascii=False)
    return f"[{item['type']} {told}]"


def _readable(value: Any) -> Any:
    """Without what only its provider can read."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if "encrypted" not in key}
    return [_readable(item) for item in value] if isinstance(value, list) else value
