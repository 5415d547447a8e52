"""How a request uses the prefix cache: `cache_salt`, as vLLM has it, and `cache_prompt`, as llama-server has it."""

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields

MAX_SALT_CHARS = 256


def read_cache_use(fields: Fields) -> tuple[str | None, bool]:
    """The salt that tells the request's tenant apart, None without one; and whether cached prompts are reused.

    RequestError for an empty or a long salt.
    """
    salt, reuse = fields.text("cache_salt"), fields.switch("cache_prompt", True)
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        message = f"cache_salt has {len(salt)} characters; it must have 1 to {MAX_SALT_CHARS}, or be left out"
        raise RequestError(message, "cache_salt", "invalid_value")
    return salt, reuse
