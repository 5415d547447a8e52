"""The place of a request among the waiting ones: vLLM's `priority`, and OpenAI's `service_tier`."""

from ckdist.engine.queue_place import QueuePlace
from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields

MAX_PRIORITY = 1 << 53  # JSON's exact integers
BATCH_TIERS = ("flex", "batch")
INTERACTIVE_TIERS = ("auto", "default", "priority", "scale", "standard", "standard_only")


def read_place(fields: Fields) -> QueuePlace:
    """Returns the class and the priority of a request, without its client. Raises RequestError for an unknown tier."""
    tier = fields.text("service_tier", "auto")
    if tier not in BATCH_TIERS + INTERACTIVE_TIERS:
        known = ", ".join(BATCH_TIERS + INTERACTIVE_TIERS)
        raise RequestError(
            f"service_tier {tier[:40]!r} is not known; known are {known}", "service_tier", "invalid_value"
        )
    priority = fields.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY)
    return QueuePlace(batch=tier in BATCH_TIERS, priority=priority)
