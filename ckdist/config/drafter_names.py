"""Names of drafters, those of other servers included, and vLLM's form of the flags."""

import json
from typing import Any, cast

from ckdist.config.draft_config import MAX_DRAFT, SPECS
from ckdist.errors import ConfigError

# Names of other servers for these drafters.
ALIASES = {
    "none": "off", "ngram-simple": "ngram", "ngram-map-k": "ngram", "ngram-map-k4v": "ngram", "ngram-mod": "ngram",
    "ngram-cache": "suffix", "prompt_lookup": "ngram", "draft": "model", "draft-simple": "model",
    "draft_model": "model", "draft-mtp": "mtp", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp", "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp", "glm4_moe_lite_mtp": "mtp", "mimo_v2_mtp": "mtp", "mimo_mtp": "mtp",
}  # fmt: skip
MISSING = ("eagle", "eagle3", "draft-eagle3", "medusa")
COUNT, LENGTHS = "num_speculative_tokens", ("prompt_lookup_min", "prompt_lookup_max")


def drafter_name(name: str) -> str:
    """Returns a name of SPECS. Raises ValueError for a drafter that does not exist."""
    found = ALIASES.get(name, name)
    if found in SPECS:
        return found
    if name in MISSING:
        raise ValueError(f"{name} is not supported: a model of its own kind predicts drafts; use mtp, model or suffix")
    raise ValueError(f"{name[:40]} is not known; use {', '.join(SPECS)}")


def draft_flags(text: str) -> dict[str, str | int]:
    """Fields of DraftFlags in vLLM's form. Raises ConfigError if it is wrong."""
    flag = "--speculative-config"
    try:
        given = cast("dict[str, Any] | None", json.loads(text))
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f'{flag} {text[:40]} is not a JSON object, such as {{"method": "ngram"}}')
    unknown = [name for name in given if name not in ("method", "model", COUNT, *LENGTHS)]
    if unknown:
        raise ConfigError(f"{flag}: {unknown[0][:40]} is not supported; known are method, model and {COUNT}")
    try:
        method = str(given.get("method", "model" if "model" in given else "ngram"))
        fields: dict[str, str | int] = {"spec": drafter_name(method)}
    except ValueError as error:
        raise ConfigError(f"{flag}: method {error}") from None
    if "model" in given:
        if fields["spec"] != "model" or not isinstance(given["model"], str):
            raise ConfigError(f"{flag}: model {str(given['model'])[:40]} must be the name of a model, for method model")
        fields["model_draft"] = given["model"]
    if COUNT in given:
        count = given[COUNT]
        if type(count) is not int or not 1 <= count <= MAX_DRAFT:
            raise ConfigError(f"{flag}: {COUNT} {str(count)[:40]} must be a whole number from 1 to {MAX_DRAFT}")
        fields["draft_max"] = count
    return fields
