"""Resolves the value of `-m` to a path: an existing path, a URL, a name of the catalogue, or a repository of a hub."""

import os
from typing import overload

from ckdist.comm.host_name import machine_name
from ckdist.comm.world import SingleWorld
from ckdist.comm.world_protocol import World
from ckdist.errors import CkdistError, ConfigError, FetchError, UserError
from ckdist.hub.model_url import PREFIX, is_url


def known_names() -> str:
    """Lists the names that `-m` accepts, for a message."""
    from ckdist.hub.catalogue import CATALOGUE

    return ", ".join([*CATALOGUE, f"{PREFIX}owner/repo[:quant]", "https://host/model.gguf"])


def find(name: str, accept_license: bool = False, progress: bool = False) -> str:
    """Returns the path of the model `name` on this host. Fetches the model if necessary. An existing path is kept.

    Raises:
        ConfigError: There is no such model.
        FetchError: It cannot be fetched.
    """
    if _exists(name):
        return name
    if is_url(name):
        from ckdist.hub.remote import remote_model

        return remote_model(name)
    if name.startswith(PREFIX):
        from ckdist.hub.repository import fetch_repository

        return str(fetch_repository(name, progress))
    from ckdist.hub.catalogue import CATALOGUE

    if name not in CATALOGUE:
        raise ConfigError(
            f"{name!r} is neither a file or folder nor a known model: use a path, or one of {known_names()}"
        )
    from ckdist.hub.fetch import fetch
    from ckdist.hub.store import Store

    return str(fetch(CATALOGUE[name], Store(), accept_license, progress))


@overload
def resolve(name: str, world: World | None = None) -> str: ...
@overload
def resolve(name: None, world: World | None = None) -> None: ...
@overload
def resolve(name: str | None, world: World | None = None) -> str | None: ...
def resolve(name: str | None, world: World | None = None) -> str | None:
    """Returns the path of `name` on every rank; None stays None. A collective call.

    One process of each host looks and fetches while the others wait.

    Raises:
        ConfigError, FetchError: It failed on some host. All ranks raise the same error.
    """
    world = world or SingleWorld()
    path, problem = None, None
    if name is not None and world.local_rank == 0:
        try:
            path = find(name, progress=True)
        except CkdistError as error:
            problem = error
    answers = world.gather([path, problem and str(problem), isinstance(problem, UserError)])
    if problem is not None:
        raise problem
    for rank, (_, text, user) in enumerate(answers):
        if text:
            where = "" if world.hosts[rank] == world.hosts[0] else f"{machine_name(world.hosts[rank])}: "
            raise (ConfigError if user else FetchError)(where + text)
    return answers[world.hosts.index(world.hosts[world.rank])][0]


def _exists(name: str) -> bool:
    try:
        return os.path.exists(name)  # noqa: PTH110 - also False if access is denied
    except ValueError:  # a null byte
        return False
