"""Drafts of one request: llama-server's `speculative.type`, `n_max`, `n_min` and `p_min`; and `spec`."""

from typing import Any

from ckdist.config.draft_config import MAX_DRAFT
from ckdist.config.drafter_names import drafter_name
from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields

KINDS = ("spec", "speculative.type")


def read_drafts(fields: Fields) -> dict[str, Any]:
    """Returns `spec` and `draft_` fields of SamplingParams. Raises RequestError for a drafter that does not exist."""
    kind, name = fields.text(KINDS), next((name for name in KINDS if fields.value(name, str)), KINDS[0])
    try:
        kind = kind and drafter_name(kind)
    except ValueError as error:
        raise RequestError(f"{name} {error}", name, "invalid_value") from None
    most = fields.integer("speculative.n_max", 0, 0, 1 << 20)
    # 0: no drafts, as for llama-server; not given: the server's own.
    if fields.value("speculative.n_max", int) is not None and most == 0:
        kind = "off"
    least = fields.integer("speculative.n_min", None, 0, MAX_DRAFT)
    p_min = fields.number("speculative.p_min", 0.0, 0.0, 1.0)
    return {"spec": kind, "draft_max": min(most, MAX_DRAFT) or None, "draft_min": least, "draft_p_min": p_min or None}
