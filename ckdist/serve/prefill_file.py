"""The prompts of --prefill-file, which are computed before the server's first request."""

import json
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckdist.errors import ConfigError
from ckdist.serve.accounts import Account, Accounts
from ckdist.serve.problems import Problem
from ckdist.text_file import read_text_file

if TYPE_CHECKING:  # rank 0 reads the file too, and needs no HTTP library
    from ckdist.serve.service import Service

FLAG = "--prefill-file"
MAX_BYTES = 64 << 20
MAX_PROMPTS = 1000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptAhead:
    """A prompt to compute.

    Attributes:
        where: The file and its line.
        body: As for /v1/cache/prefill.
        key: Name of the API key whose requests shall find the prompt. None: those of every key.
    """

    where: str
    body: dict[str, Any]
    key: str | None = None


def read_prefill_file(path: str, keys: Collection[str]) -> list[PromptAhead]:
    """Reads a file of JSON lines (*.jsonl), or a text that is one system prompt.

    Args:
        keys: Names of the API keys.

    Raises:
        ConfigError: The file cannot be read, a line is not a JSON object, or it names an unknown key.
    """
    where = f"{FLAG} {path}"
    text = read_text_file(path, where, MAX_BYTES)
    if not text.strip():
        raise ConfigError(f"{where} is empty; write a system prompt, or JSON lines into a file *.jsonl")
    if not path.endswith(".jsonl"):
        return [PromptAhead(where, {"messages": [{"role": "system", "content": text.removesuffix("\n")}]})]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > MAX_PROMPTS:
        raise ConfigError(f"{where} has {len(lines)} prompts, of at most {MAX_PROMPTS}; shorten it")
    return [_of_line(line, f"{where}: line {number}", keys) for number, line in lines]


def _of_line(line: str, where: str, keys: Collection[str]) -> PromptAhead:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise ConfigError(f"{where} must be an object with messages or a prompt")
    key = body.pop("key", None)
    if key is not None and not (isinstance(key, str) and key in keys):
        known = ", ".join(sorted(keys)[:10]) or "none"
        raise ConfigError(f"{where} names the key {str(key)[:64]!r}; known are {known}")
    return PromptAhead(where, body, key)


async def prefill_all(service: "Service", path: str) -> None:
    """Computes the prompts of the file for each tenant, one by one.

    Raises:
        ConfigError: A prompt is wrong or too long.
        EngineError: The engine or a text worker has failed.
    """
    begun, computed, cached = time.monotonic(), 0, 0
    prompts = read_prefill_file(path, service.accounts.names)
    for prompt in prompts:
        try:
            prepared = await service.prepare_body("prefill", json.dumps(prompt.body).encode())
            for account in _tenants(service.accounts, prompt.key):
                answer = await service.prefill(prepared, account)
                computed, cached = computed + answer["computed_tokens"], cached + answer["cached_tokens"]
        except Problem as problem:
            if problem.status >= 500:
                raise
            raise ConfigError(f"{prompt.where}: {problem}") from None
    seconds = time.monotonic() - begun
    log.warning("%s: %d tokens were computed in %.1f s, and %d were cached", FLAG, computed, seconds, cached)


def _tenants(accounts: Accounts, key: str | None) -> list[Account]:
    """One account without limits for each tenant that the prompt is for."""
    if not accounts.ask_for_key:
        return [Account()]
    names = accounts.names if key is None else [key]
    roots = {accounts.root(name): name for name in names}
    return [Account(name, root) for root, name in roots.items()]
