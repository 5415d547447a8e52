"""Which hosts a job uses, and which ranks each of them has."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file

MAX_RANKS = 256
MAX_HOSTFILE_BYTES = 1 << 20
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"  # a dash in front would be a flag of ssh's
_ENTRY = re.compile(rf"(?P<name>(?:{_NAME}@)?{_NAME})(?::(?P<colon>\d{{1,4}}))?(?P<rest>(?:\s+[\w.-]+=\S+)*)")
_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Host:
    """`name`: as ssh takes it, `user@host` too; `slots`: how many ranks it takes, None if nobody said."""

    name: str
    slots: int | None = None

    @property
    def is_this(self) -> bool:
        """Whether it is the one that this process runs on."""
        own = socket.gethostname()
        return self.name in (*_LOCAL, own, own.split(".", maxsplit=1)[0])


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`node1,me@node2:4` as two hosts, the second with four slots. ConfigError for what is no host."""
    return _joined([_entry(part.strip(), "--hosts") for part in text.split(",")])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file, one a line: `node1`, `node1 slots=4` (Open MPI), `node1:4` (MPICH, Intel MPI).

    A name on several lines has as many slots (Slurm, PBS). `#` begins a comment. ConfigError for anything else.
    """
    lines = read_text_file(path, path, MAX_HOSTFILE_BYTES).splitlines()
    entries = [_entry(text, f"{path} line {n}") for n, line in enumerate(lines, 1) if (text := _stripped(line))]
    if not entries:
        raise ConfigError(f"{path} names no host: write one on each line, as `node1 slots=2`")
    return _joined(entries)


def _stripped(line: str) -> str:
    """A line without its comment."""
    return line.split("#", maxsplit=1)[0].strip()


def _entry(text: str, where: str) -> Host:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{where}: {text!r:.80} is no host: write `name`, `name:4`, `user@name` or `name slots=4`")
    named = dict(part.split("=", maxsplit=1) for part in match["rest"].split())
    count = match["colon"] or named.get("slots")
    if count is not None and not (count.isdigit() and 0 < int(count) <= MAX_RANKS):
        raise ConfigError(f"{where}: {match['name']} has {count} slots; from 1 to {MAX_RANKS} are possible")
    return Host(match["name"], int(count) if count else None)


def _joined(entries: Sequence[Host]) -> tuple[Host, ...]:
    """Entries of the same name are one host, whose slots add up."""
    names = list(dict.fromkeys(entry.name for entry in entries))
    slots = {name: [entry.slots for entry in entries if entry.name == name] for name in names}
    return tuple(
        Host(name, None if counts == [None] else sum(count or 1 for count in counts)) for name, counts in slots.items()
    )


def place_ranks(ranks: int | None, hosts: Sequence[Host]) -> dict[str, range]:
    """The ranks of each host, one host filled after the other; a host may get none.

    `ranks` None: as many as there are slots. If nobody said slots, hosts get equally many. ConfigError if there are too
    few slots.
    """
    room = [host.slots or 1 for host in hosts]
    if ranks is None:
        ranks = sum(room)
    if any(host.slots for host in hosts):
        if sum(room) < ranks:
            raise ConfigError(f"{ranks} ranks need as many slots, and the hosts have {sum(room)}: give fewer, or slots")
    else:
        room = [ranks * (i + 1) // len(hosts) - ranks * i // len(hosts) for i in range(len(hosts))]
    placed, first = {}, 0
    for host, count in zip(hosts, room, strict=True):
        placed[host.name] = range(first, min(first + count, ranks))
        first = placed[host.name].stop
    return placed
