"""The hosts of a job, and the ranks of each."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ckdist.comm.bootstrap.launchers import MAX_RANKS
from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file

MAX_HOSTFILE_BYTES = 1 << 20
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"  # ssh would read a leading dash as a flag
_ENTRY = re.compile(rf"(?P<name>(?:{_NAME}@)?{_NAME})(?::(?P<colon>\d{{1,4}}))?(?P<rest>(?:\s+[\w.-]+=\S+)*)")
_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Host:
    """A host of a job."""

    name: str  # as for ssh, also `user@host`
    slots: int | None = None  # number of ranks that it takes; None if it was not given

    @property
    def is_this(self) -> bool:
        """True if it is the host of this process."""
        own = socket.gethostname()
        return self.name in (*_LOCAL, own, own.split(".", maxsplit=1)[0])


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses `node1,me@node2:4` into two hosts, the second with four slots. Raises ConfigError if one is invalid."""
    return _joined([_entry(part.strip(), "--hosts") for part in text.split(",")])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Reads hosts from a file, one per line: `node1`, `node1 slots=4` (Open MPI), `node1:4` (MPICH, Intel MPI).

    Each further line with the same name adds a slot (Slurm, PBS). `#` begins a comment. Raises ConfigError for other
    lines.
    """
    lines = read_text_file(path, path, MAX_HOSTFILE_BYTES).splitlines()
    texts = [line.split("#", maxsplit=1)[0].strip() for line in lines]
    entries = [_entry(text, f"{path} line {n}") for n, text in enumerate(texts, 1) if text]
    if not entries:
        raise ConfigError(f"{path} names no host: write one on each line, as `node1 slots=2`")
    return _joined(entries)


def _entry(text: str, where: str) -> Host:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{where}: {text!r:.80} is not a host: write `name`, `name:4`, `user@name` or `name slots=4`")
    named = dict(part.split("=", maxsplit=1) for part in match["rest"].split())
    count = match["colon"] or named.get("slots")
    if count is not None and not (count.isdigit() and 0 < int(count) <= MAX_RANKS):
        raise ConfigError(f"{where}: {match['name']} has {count} slots; from 1 to {MAX_RANKS} are possible")
    return Host(match["name"], int(count) if count else None)


def _joined(entries: Sequence[Host]) -> tuple[Host, ...]:
    """Merges entries of the same name, and adds up their slots."""
    names = list(dict.fromkeys(entry.name for entry in entries))
    slots = {name: [entry.slots for entry in entries if entry.name == name] for name in names}
    return tuple(
        Host(name, None if counts == [None] else sum(count or 1 for count in counts)) for name, counts in slots.items()
    )


def place_ranks(ranks: int | None, hosts: Sequence[Host]) -> dict[str, range]:
    """Assigns ranks to hosts, filling one host after the other. A host may get none.

    Args:
        ranks: Number of ranks. None: the number of slots. If no host has slots, hosts get equal numbers.

    Raises:
        ConfigError: There are too few slots.
    """
    room = [host.slots or 1 for host in hosts]
    if ranks is None:
        ranks = sum(room)
    if any(host.slots for host in hosts):
        if sum(room) < ranks:
            raise ConfigError(
                f"{ranks} ranks need {ranks} slots, and the hosts have {sum(room)}: use fewer ranks, or more slots"
            )
    else:
        room = [ranks * (i + 1) // len(hosts) - ranks * i // len(hosts) for i in range(len(hosts))]
    placed, first = {}, 0
    for host, count in zip(hosts, room, strict=True):
        placed[host.name] = range(first, min(first + count, ranks))
        first = placed[host.name].stop
    return placed
