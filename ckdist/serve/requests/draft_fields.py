"""Drafts of one request: llama-server's `speculative.type` and `speculative.n_max`, and `spec`."""

from typing import Any

from ckdist.config.draft_config import MAX_DRAFT
from ckdist.config.drafter_names import drafter_name
from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields

KINDS = ("spec", "speculative.type")


def read_drafts(fields: Fields) -> dict[str, Any]:
    """Returns `spec` and `draft_max` of SamplingParams. Raises RequestError for a drafter that does not exist."""
    kind = fields.text(KINDS)
    try:
        kind = kind and drafter_name(kind)
    except ValueError as error:
        raise RequestError(f"spec {error}", "spec", "invalid_value") from None
    most = fields.integer("speculative.n_max", 0, 0, 1 << 20)
    # 0: no drafts, as for llama-server; not given: the server's own.
    if fields.value("speculative.n_max", int) is not None and most == 0:
        kind = "off"
    return {"spec": kind, "draft_max": min(most, MAX_DRAFT) or None}
