"""API keys, their names and their limits: from the command line, the environment and a key file."""

import hashlib
import logging
import os
from dataclasses import dataclass, field, replace

from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError

VARIABLE = "CKDIST_API_KEY"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """The limits and rights of all clients whose keys have one name. None: no limit, no right."""

    max_running: int | None = None  # sequences in the engine at once
    max_waiting: int | None = None  # sequences that wait while `max_running` others run
    tokens_per_minute: int | None = None  # tokens of prompts and answers
    models: bool | None = None  # may load, unload, copy, pull and delete models

    def over(self, defaults: "KeyLimits") -> "KeyLimits":
        """Returns these limits, with `defaults` for those that are None."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return replace(defaults, **own)


@dataclass(frozen=True)
class ApiKey:
    """An API key. All keys of one name are one tenant."""

    name: str
    key: str = field(repr=False)
    limits: KeyLimits = KeyLimits()

    @property
    def tenant(self) -> bytes:
        """The root of the tenant's blocks in the prefix cache: 32 bytes."""
        return hashlib.blake2b(self.name.encode(), digest_size=32, person=b"ckdist key name").digest()

    @classmethod
    def without_name(cls, key: str) -> "ApiKey":
        """Returns a key whose name is derived from its digest."""
        return cls(f"key-{hashlib.sha256(key.encode()).hexdigest()[:16]}", key)


def default_limits(config: ServeConfig) -> KeyLimits:
    """Returns the limits of clients whose keys have none of their own."""
    limits = config.max_running_per_key, config.max_waiting_per_key, config.tokens_per_minute_per_key
    return KeyLimits(max_running=limits[0], max_waiting=limits[1], tokens_per_minute=limits[2])


def asks_for_key(config: ServeConfig) -> bool:
    """True if the server refuses clients without a key."""
    return bool(config.api_key or config.api_key_file or os.environ.get(VARIABLE))


def given_keys(config: ServeConfig) -> tuple[ApiKey, ...]:
    """Returns the keys of --api-key, else of CKDIST_API_KEY. Raises ConfigError if the value is empty."""
    source, text = ("--api-key", config.api_key) if config.api_key is not None else (VARIABLE, os.environ.get(VARIABLE))
    if text is None:
        return ()
    keys = [key.strip() for key in text.split(",") if key.strip()]
    if not keys:
        raise ConfigError(f"{source} is empty; give a key, or leave it out")
    if config.api_key is not None:
        told = "every user of this host sees --api-key in the list of processes; put the key into %s or --api-key-file"
        log.warning(told, VARIABLE)
    from ckdist.serve.key_file import checked_keys

    return checked_keys(tuple(map(ApiKey.without_name, keys)), source)


def read_key_file(path: str) -> tuple[ApiKey, ...]:
    """Reads the keys in a file. Raises ConfigError as `key_file.read_keys` does."""
    from ckdist.serve.key_file import read_keys

    return read_keys(path)
