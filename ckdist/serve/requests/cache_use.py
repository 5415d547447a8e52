"""How a request uses the prefix cache: vLLM's `cache_salt`, and llama-server's `cache_prompt`."""

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields

MAX_SALT_CHARS = 256


def read_cache_use(fields: Fields) -> tuple[str | None, bool]:
    """Returns the salt of the request's tenant (or None), and whether cached prompts are reused.

    Raises RequestError for an empty salt, and for one that is too long.
    """
    salt, reuse = fields.text("cache_salt"), fields.switch("cache_prompt", True)
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        message = f"cache_salt has {len(salt)} characters; it must have 1 to {MAX_SALT_CHARS}, or be left out"
        raise RequestError(message, "cache_salt", "invalid_value")
    return salt, reuse
