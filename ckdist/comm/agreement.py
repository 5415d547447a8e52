"""Checks that all ranks were started in the same way: ckdist's build, the command, its flags, the instruction set.

Every function that takes a world is a collective call.
"""

import functools
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ckdist import __version__, native
from ckdist.comm.host_name import rank_on_host
from ckdist.comm.world import start_world
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

OWN_FLAGS = ("threads", "threads_batch", "kv_memory", "verbose")  # a host may have more cores or memory than another
SHOWN = 24  # characters of a value around its first difference
HIDDEN = "SHA-256 "  # prefix of a value that no message may show
BUILD = ("ckdist's version", "the native library's build", "the native declarations")


def odd_one(values: Sequence[Any]) -> tuple[int, int] | None:
    """Returns (index of the first odd value, index of a usual value), or None if all are equal.

    The usual value is the most frequent one; if several are, the first of them.
    """
    usual = Counter(values).most_common(1)[0][0]
    odd = next((index for index, value in enumerate(values) if value != usual), None)
    return None if odd is None else (odd, values.index(usual))


def agree(world: World, what: str, value: str) -> None:
    """Raises ConfigError on every rank unless all ranks have the same `value`."""
    agree_fields(world, {what: value}, lambda _: "start all ranks with the same model and flags")


def agree_fields(world: World, values: Mapping[str, str], remedy: Callable[[str], str]) -> None:
    """Raises ConfigError on every rank if values differ. The error shows the first such field."""
    rows = list(values.items())
    digests = world.gather(hashlib.sha256(repr(rows).encode()).digest())
    if odd_one(digests) is None:
        return
    told = [dict(row) for row in world.gather(rows)]
    for name in dict.fromkeys(name for row in told for name in row):
        if pair := odd_one([row.get(name, "") for row in told]):
            shown = shown_apart(*(told[rank].get(name, "") for rank in pair))
            where = [rank_on_host(world, rank) for rank in pair]
            raise ConfigError(f"{name} is {shown[0]} on {where[0]} and {shown[1]} on {where[1]}: {remedy(name)}")


def shown_apart(a: str, b: str) -> tuple[str, str]:
    """Shortens two values for a message to the characters around their first difference."""
    if a.startswith(HIDDEN) or b.startswith(HIDDEN):
        return "one value", "another"
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = 0 if first <= SHOWN else first - SHOWN // 2
    end = first + SHOWN
    front = "…" if begin else ""
    shown = [front + text[begin:end] + ("…" if len(text) > end else "") for text in (a, b)]
    return shown[0], shown[1]


def agree_on_start(world: World, config: "DataclassInstance") -> None:
    """Compares ckdist's build and the flags of all ranks, and selects the best common instruction set.

    Threads and memory may differ. Raises ConfigError that names the field, both values and both hosts.
    """
    if world.size == 1:
        return
    values = dict(zip(BUILD, (__version__, *build_digests()), strict=True))
    values |= {"the command": type(config).__name__.removesuffix("Config").removesuffix("Command").lower()}
    values |= flag_values(config)
    agree_fields(world, values, _remedy)
    use_common_level(world)


def flag_values(config: "DataclassInstance") -> dict[str, str]:
    """The values that must be equal on all ranks, by flag. A secret is replaced by its digest."""
    found = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in OWN_FLAGS:
            continue
        if isinstance(value, tuple) and len(value) == 1:
            value = value[0]  # a flag that may be repeated and was given once
        secret = not item.repr and value is not None
        name = item.metadata["flags"][-1] if item.metadata.get("flags") else item.name
        found[name] = HIDDEN + hashlib.sha256(repr(value).encode()).hexdigest() if secret else repr(value)
    return found


def _remedy(name: str) -> str:
    if name in BUILD:
        return "install the same ckdist on every host"
    return f"start all ranks with the same {name if name.startswith('-') else 'command and configuration'}"


@functools.cache
def build_digests() -> tuple[str, str]:
    """Digests of the native library and of its declarations."""
    files = native.LIBRARY, native.HERE / "declarations.py"
    library, declarations = (hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files)
    return library, declarations


def use_common_level(world: World) -> None:
    """Makes all ranks compute with the best instruction set that every rank has.

    Vectors of another width add in another order. Ranks of a mixture of experts could then choose other experts for a
    token.
    """
    own = native.isa()
    here = [name for name, lacks in native.isas().items() if not lacks]
    told = world.gather([here[here.index(own) :], "CKDIST_ISA" in os.environ])
    best = [levels[0] for levels, _ in told]
    if odd_one(best) is None:
        return
    common = next(name for name in told[0][0] if all(name in levels for levels, _ in told))
    native.use_isa(common)
    if world.rank == 0:
        firsts = [best.index(name) for name in dict.fromkeys(best)]
        those = ", ".join(
            f"{best[rank]} on {rank_on_host(world, rank)}{', by CKDIST_ISA' if told[rank][1] else ''}"
            for rank in firsts
        )
        log.warning("ranks have different instructions (%s): all compute with %s", those, common)


def start_ranks(config: "DataclassInstance") -> World:
    """Returns the world of this process, after all its ranks have agreed on how they were started."""
    world = start_world(getattr(config, "encrypt", "auto"))
    agree_on_start(world, config)
    return world
