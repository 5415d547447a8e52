"""Chooses the transport between hosts: the named one, or the fastest that works on every rank.

Score: seconds of a small exchange (decoding) × seconds of a large one (prompts), each the least of several calls, with
the slowest measured host. Lower is better. A transport must beat an earlier one of `ORDER` by more than the
measurement's noise, so that a job gets the same one in every run. Results never depend on the choice.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckdist import native
from ckdist.comm.bootstrap.sockets import seals
from ckdist.comm.bootstrap.tcp_world import INTERFACE_VARIABLE
from ckdist.comm.transports.link import FEW, LARGE, SMALL
from ckdist.comm.transports.names import ORDER
from ckdist.comm.transports.opening import open_transport
from ckdist.comm.world_protocol import Log, World, has_mpi
from ckdist.errors import CkdistError, CommError, ConfigError, UserError
from ckdist.native import CData

NOISE = 0.1
MEASURED_HOSTS = 8

Result = TypeVar("Result")

lib, ffi = native.lib, native.ffi


@dataclass(frozen=True)
class ChosenTransport:
    """A transport that was opened."""

    name: str
    handle: CData  # belongs to the communicator that is made of it
    reason: str  # why it was chosen, in one line
    times: list[float] | None = None  # seconds of exchanges of SMALL and LARGE, if they were measured


def choose_transport(
    world: World, wanted: str, timeout: float, interface: str | None = None, log: Log | None = None
) -> ChosenTransport:
    """Opens the transport `wanted`, or with "auto" the fastest that works on every rank.

    A collective call with the same result on every rank. If a named transport does not work, raises ConfigError if the
    user can mend it, else CommError.
    """
    if getattr(world, "encrypt", "auto") == "always" and wanted != "tcp" and len(set(world.hosts)) > 1:
        if wanted != "auto":
            raise ConfigError(f"--transport {wanted} encrypts nothing, and --encrypt is always: leave one of them out")
        wanted = "tcp"
    candidates = [wanted] if wanted != "auto" else [name for name in ORDER if name != "mpi" or has_mpi(world)]
    opened: dict[str, CData] = {}
    refused: dict[str, CkdistError] = {}
    for name in candidates:
        handle, error = _everywhere(world, functools.partial(_open, world, name, timeout, interface, log))
        if error is None:
            opened[name] = handle
        else:
            refused[name] = error
    if not opened:
        name, error = list(refused.items())[-1]
        problem = (
            f"--transport {_why_not(wanted, error)}; leave it out, or use another"
            if wanted != "auto"
            else f"nothing joins the hosts: {_why_not(name, error)}"
        )
        raise ConfigError(problem) if isinstance(error, ConfigError) else CommError(problem)
    times: dict[str, list[float]] = {}
    for name, handle in opened.items() if len(opened) > 1 else ():
        slowest, error = _everywhere(world, functools.partial(exchange_seconds, world, handle))
        if slowest is not None:
            times[name] = slowest
        elif error is not None:
            refused[name] = error
    if len(opened) > 1 and not (times := world.broadcast(times)):
        raise CommError(f"nothing joins the hosts: {refused[list(opened)[-1]]}")
    chosen, *others = times or opened
    for name in others:
        if _product(times[name]) < _product(times[chosen]) * (1 - NOISE):
            chosen = name
    for name, handle in opened.items():
        if name != chosen:
            ffi.release(handle)
    reason = _reason(chosen, wanted, times, refused) + _protection(world, chosen)
    return ChosenTransport(chosen, opened[chosen], reason, times.get(chosen))


def _protection(world: World, chosen: str) -> str:
    if len(set(world.hosts)) == 1:
        return ""
    if chosen == "tcp":
        return "; its traffic is encrypted" if seals(world) else "; nothing is encrypted (--encrypt never)"
    return f"; {chosen} does not encrypt: use it on a closed network, or --encrypt always for tcp with encryption"


def _product(times: Sequence[float]) -> float:
    """Score: seconds of a small message × seconds of a large one; lower is better."""
    return times[0] * times[1]


def _why_not(name: str, error: CkdistError) -> str:
    return str(error) if str(error).startswith(name) else f"{name} does not work: {error}"


def _reason(chosen: str, wanted: str, times: Mapping[str, Sequence[float]], refused: Mapping[str, CkdistError]) -> str:
    if wanted != "auto":
        return f"{chosen} between ranks, as demanded"
    reasons = [
        f"{name}: {times[name][0] * 1e6:.0f} µs for {SMALL[0] >> 10} KiB, "
        f"{times[name][1] * 1e3:.2f} ms for {LARGE[0] >> 20} MiB"
        for name in sorted(times, key=lambda n: n != chosen)
    ]
    reasons += [_why_not(name, error) for name, error in refused.items()]
    return f"{chosen} between hosts, {'the fastest' if times else 'nothing else is there'}" + (
        f" ({'; '.join(reasons)})" if reasons else ""
    )


def _everywhere(world: World, action: Callable[[], Result]) -> tuple[Result | None, CkdistError | None]:
    """Runs `action` on every rank.

    Returns:
        (the action's result, None), or (None, the first rank's error) on every rank if any rank failed.
    """
    result, error = None, None
    try:
        result = action()
    except CkdistError as problem:
        error = problem
    failures = [
        (rank, text, user)
        for rank, (text, user) in enumerate(world.gather([error and str(error), isinstance(error, UserError)]))
        if text
    ]
    if not failures:
        return result, None
    if result is not None and not isinstance(result, list):
        ffi.release(result)
    rank, text, user = failures[0]
    is_same = len(failures) == world.size and len({text for _, text, _ in failures}) == 1
    return None, (ConfigError if user else CommError)(text if is_same else f"rank {rank}: {text}")


def _open(world: World, name: str, timeout: float, interface: str | None, log: Log | None) -> CData:
    """Raises ConfigError or CommError if the transport does not work."""
    if name == "mpi" and not has_mpi(world):
        raise ConfigError("no MPI launcher started this process: use mpirun")
    return open_transport(world, name, interface or os.environ.get(INTERFACE_VARIABLE), timeout, log)


def exchange_seconds(world: World, handle: CData, sizes: Sequence[tuple[int, int]] = (SMALL, LARGE)) -> list[float]:
    """Measures exchanges of rank 0 with the first ranks of other hosts.

    Returns:
        Least seconds of the slowest host for each of `sizes` (bytes, calls); zeros on ranks that take no part. Other
        work on the hosts makes single calls slower, and never faster.
    """
    leaders = (
        [world.hosts.index(host) for host in dict.fromkeys(world.hosts)]
        if len(set(world.hosts)) > 1
        else list(range(world.size))
    )
    slowest = [0.0] * len(sizes)
    for leader in leaders[1 : 1 + MEASURED_HOSTS]:
        if world.rank not in (0, leader):
            continue
        for i, (size, calls) in enumerate(sizes):
            peer = leader if world.rank == 0 else 0
            slowest[i] = max(slowest[i], native.call(lib.ckdist_transport_time, handle, peer, size, calls))
    return slowest


def measured(world: World, chosen: ChosenTransport) -> ChosenTransport:
    """Returns the transport with its times, the same on all ranks. A collective call."""
    if chosen.times or world.size == 1:
        return chosen
    return replace(chosen, times=world.broadcast(exchange_seconds(world, chosen.handle, [FEW, LARGE])))
