"""Fields about the engine's work on a request: its place in the queue, its use of the prefix cache, and its drafts.

They are vLLM's `priority` and `cache_salt`, OpenAI's `service_tier`, and llama-server's `cache_prompt` and
`speculative.*`.
"""

from typing import Any

from ckdist.config.draft_config import MAX_DRAFT
from ckdist.config.drafter_names import drafter_name
from ckdist.engine.queue_place import QueuePlace
from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields, wrong

MAX_SALT_CHARS = 256
MAX_PRIORITY = 1 << 53  # JSON's exact integers
BATCH_TIERS = ("flex", "batch")
TIERS = (*BATCH_TIERS, "auto", "default", "priority", "scale", "standard", "standard_only")
KINDS = ("spec", "speculative.type")


def read_cache_and_place(fields: Fields) -> dict[str, Any]:
    """Returns the fields `cache_salt`, `cache_prompt` and `place` (without a client) of a prepared request.

    Raises RequestError for a salt that is empty or too long, and for an unknown tier.
    """
    salt, reuse = fields.text("cache_salt"), fields.switch("cache_prompt", True)
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        text = f"has {len(salt)} characters; it must have 1 to {MAX_SALT_CHARS}, or be left out"
        raise wrong("cache_salt", text)
    tier = fields.text("service_tier", "auto")
    if tier not in TIERS:
        raise wrong("service_tier", f"{tier[:40]!r} is not known; known are {', '.join(TIERS)}")
    priority = fields.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY)
    place = QueuePlace(batch=tier in BATCH_TIERS, priority=priority)
    return {"cache_salt": salt, "cache_prompt": reuse, "place": place}


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
