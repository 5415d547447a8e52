"""The figures of a machine for plans. Reads and writes them as TOML.

`ckdist bench machine --save FILE` measures a machine. `machines/` has some from public data sheets. Units are bytes,
operations and seconds. A multiply-add is two operations.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from ckdist.comm.thresholds import cache_folder
from ckdist.comm.transports.link import Link
from ckdist.config.given_elsewhere import read_toml
from ckdist.config.options import checked, checked_value, option
from ckdist.errors import ConfigError, did_you_mean
from ckdist.weights.packed_type import activation_format

CATALOGUE = pathlib.Path(__file__).parent / "machines"
MAX_TYPES = 256
FORMATS = "F32", "BF16", "Q8_0"  # the weight type that stands for each activation format (float32, bfloat16, int8)
MANY = 256  # rows of a product at its second rate
# Weights per second that a core expands for prompts in tiles: assumed. A core of a Xeon with AMX (family 6 model 207)
# expanded 12 to 13e9, by the rates of Q4_K and BF16; vectors of a Zen 5 core 13 to 21e9.
EXPANDED = 1e10
SATURATING = 0.5  # of a node's cores reach its bandwidth
MEASURED, DATA_SHEET = "measured", "data sheet, not measured"
# By source and phase, the smallest and the largest measured speed over its prediction, in all runs of
# docs/performance/predictions.md and in all results of docs/papers.md.
SEEN = {
    (MEASURED, "decode"): (0.4, 1.24),
    (MEASURED, "prefill"): (0.59, 1.43),
    (DATA_SHEET, "decode"): (0.26, 1.17),
    (DATA_SHEET, "prefill"): (0.11, 1.7),
}
HALVINGS = 40
METHOD = 4  # version of the measurement: stored figures of other versions are not used


def figure(section: str, help: str, low: float, high: float, default: Any = MISSING, kind: type = float) -> Any:
    """A number in a section of the file, with its range. Without a default it is required."""
    return option(default, help=help, within=(low, high), kind=kind, facets={"section": section})


def words(help: str, default: str = "") -> Any:
    """A text before the first section of the file."""
    return option(default, help=help, facets={"section": ""})


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """One host in 16 figures: its NUMA nodes, with one rank each, and its link to identical hosts."""

    name: str = words("what it is")
    source: str = words(f"{MEASURED}, or {DATA_SHEET}", DATA_SHEET)
    isa: str = words("level of instructions whose kernels run")
    watts_of: str = words("part of the host that takes the watts", "processors alone")
    price_source: str = words("where the price is from, and its date")

    nodes: int = figure("host", "NUMA nodes, with a rank each", 1, 256, 1, int)
    cores: int = figure("host", "cores of a node", 1, 4096, kind=int)
    memory: float = figure("host", "bytes of a node's memory", 1 << 20, 1 << 50)
    watts: float = figure("host", "of the host at work; 0: not known", 0.0, 1e6, 0.0)
    price_per_hour: float = figure("host", "of the host; 0: not known", 0.0, 1e6, 0.0)

    bandwidth: float = figure("memory", "bytes of weights per second that products read from a node", 1e6, 1e16)
    cache: float = figure("memory", "bytes of a node's last-level caches", 0.0, 1e13, 0.0)
    cache_bandwidth: float = figure("memory", "the same from these caches; 0: as from memory", 0.0, 1e16, 0.0)

    attention: float = figure("arithmetic", "operations per second of one core in attention", 1e6, 1e18)
    elementwise: float = figure("arithmetic", "numbers per second of one core in norms and gates", 1e3, 1e15, 4e9)

    between: float = figure("steps", "seconds between two steps", 0.0, 10.0, 3e-4)
    barrier: tuple[tuple[float, float], ...] = field(
        default=(), metadata={"section": "steps", "help": "pairs [threads, seconds of their barrier]", "kind": tuple}
    )

    rank_rate: float = figure("links", "bytes per second of a rank from another rank's memory", 1e3, 1e15, 2e10)
    link_seconds: float = figure("links", "seconds of a message between hosts", 0.0, 10.0, 3e-5)
    link_rate: float = figure("links", "bytes per second between hosts", 1e3, 1e15, 1.25e9)

    # Operations per second of one core, all cores at work, in products of 1 and of MANY rows, by type of weights. Types
    # that are missing have the rates of the type of FORMATS with the same activations.
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = self.name or "the machine"
        if not self.isa:
            raise ConfigError(f"{where} has no isa: give the level of instructions whose kernels run, as avx2 or amx")
        activation_format(0, self.isa)  # ConfigError if the level is not known
        for item in fields(self):
            if item.metadata.get("kind") in (int, float):
                checked(item, getattr(self, item.name), f"{where}: {item.name}")
        _check_barrier(where, self.barrier)
        missing = [name for name in FORMATS if name not in self.rates]
        if missing or len(self.rates) > MAX_TYPES:
            raise ConfigError(f"{where}: rates need {', '.join(FORMATS)} and at most {MAX_TYPES} types of weights")
        for name, pair in self.rates.items():
            if len(pair) != 2:
                raise ConfigError(f"{where}: rates.{name} needs two rates: of products of 1 and of {MANY} rows")
            for rate in pair:
                checked_value({"low": 1e3, "high": 1e18, "kind": float}, rate, f"{where}: rates.{name}")

    def seen(self, phase: str) -> tuple[float, float]:
        """The smallest and the largest measured speed over its prediction. `phase`: decode or prefill."""
        return SEEN[MEASURED if self.source == MEASURED else DATA_SHEET, phase]

    @property
    def link(self) -> Link:
        """The link between hosts."""
        return Link(self.link_seconds, self.link_rate)

    @property
    def total_cores(self) -> int:
        """Cores of the host."""
        return self.nodes * self.cores

    @property
    def total_memory(self) -> float:
        """Bytes of memory of the host."""
        return self.nodes * self.memory

    def read_rate(self, cores: int, ranks: int, size: float) -> float:
        """Bytes of weights per second that `cores` cores of one of a node's `ranks` ranks read.

        `size`: bytes that a rank's step reads. Steps read the same bytes again, so these may still be in the cache.
        """
        missed = self.missed(size * ranks)
        share = min(1.0, cores * ranks / self.cores)  # of the cores that compute
        memory = self.bandwidth * min(1.0, share / SATURATING)
        return 1 / (missed / memory + (1 - missed) / (share * (self.cache_bandwidth or memory))) / ranks

    def missed(self, size: float) -> float:
        """The fraction of bytes that come from memory, if `size` bytes are read again and again.

        Replacement is nearly random: a byte is still there with probability exp(-n / cache) after n bytes came from
        memory. So the fraction x solves x = 1 - exp(-x * size / cache).
        """
        if size <= self.cache or not self.cache:
            return 0.0 if self.cache else 1.0
        low, high = 1e-3, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if middle < 1 - math.exp(-middle * size / self.cache) else (low, middle)
        return high

    def product_rate(self, kind: str, form: int, rows: float) -> float:
        """Operations per second of one core in products of `rows` rows with weights of type `kind`.

        Seconds are linear in rows: weights are unpacked once, and multiplied with each row.

        Args:
            form: Activation format, which stands for a type without rates.
        """
        one, many = self.rates.get(kind) or self.rates[FORMATS[form]]
        rows = min(max(rows, 1.0), MANY)
        each = max(0.0, (MANY / many - 1 / one) / (MANY - 1))  # seconds per operation of one more row
        return rows / (1 / one + (rows - 1) * each) if each else min(many, one * rows)

    def prompt_rate(self, kind: str, form: int, rows: float) -> float:
        """Operations per second of one core in products of a prompt's `rows` rows.

        With AMX, quantised weights are expanded once for all rows.
        Seconds of a weight: 1 / EXPANDED + 2 rows / rate of tiles. Tiles are those of bfloat16.
        """
        if self.isa != "amx" or FORMATS[form] != "Q8_0":
            return self.product_rate(kind, form, rows)
        once = 1 / EXPANDED
        tiles = max(1 / self.product_rate(kind, form, MANY) - once / (2 * MANY), 1 / self.product_rate("BF16", 1, MANY))
        return 1 / (tiles + once / (2 * max(rows, 1.0)))

    def barrier_seconds(self, threads: int) -> float:
        """Seconds of a barrier of `threads` threads: linear between the pairs of `barrier`, proportional beyond."""
        if threads < 2 or not self.barrier:
            return 0.0
        at, seconds = zip(*self.barrier, strict=True)
        return float(np.interp(threads, at, seconds)) * max(1.0, threads / at[-1])

    def toml(self) -> str:
        """The text of this machine's file."""
        lines, section = [], ""
        for item in fields(self):
            if item.name == "rates":
                continue
            if item.metadata["section"] != section:
                section = item.metadata["section"]
                lines += ["", f"[{section}]"]
            value = getattr(self, item.name)
            if isinstance(value, str):
                shown: object = json.dumps(value, ensure_ascii=False)  # a TOML string is one of JSON
            elif isinstance(value, tuple):
                shown = [[float(f"{number:.4g}") for number in pair] for pair in value]
            else:
                shown = f"{value:.6g}" if item.metadata["kind"] is float else value
            lines.append(f"{item.name} = {shown}  # {item.metadata['help']}")
        lines += ["", f"[rates]  # operations per second of one core, in products of 1 and of {MANY} rows"]
        lines += [f"{name} = [{one:.4g}, {many:.4g}]" for name, (one, many) in self.rates.items()]
        return "\n".join(lines) + "\n"


def read_machine_file(path: pathlib.Path) -> MachineSpec:
    """Reads a TOML file. Raises ConfigError if it cannot be read, lacks a number, or has one out of range."""
    return machine_of(read_toml(str(path)), str(path))


def machine_of(found: Mapping[str, Any], where: str) -> MachineSpec:
    """The machine with the tables of a file. Raises ConfigError, which begins with `where`."""
    known = {item.name: item for item in fields(MachineSpec) if item.name != "rates"}
    flat: dict[tuple[str, str], Any] = {}
    for name, value in found.items():
        if name == "rates":
            continue
        flat |= {(name, key): each for key, each in value.items()} if isinstance(value, dict) else {("", name): value}
    unknown = [(section, name) for section, name in flat if name not in known or section != _section(known[name])]
    if unknown:
        raise ConfigError(f"{where}: {_unknown(unknown, known)}")
    values = {name: _value(known[name], value, where) for (_, name), value in flat.items()}
    missing = [item for item in known.values() if item.name not in values and item.default is MISSING]
    if missing:
        first = missing[0].metadata
        raise ConfigError(
            f"{where} has no {first['section']}.{missing[0].name}: give the {first['help']}, "
            f"from {first['low']:g} to {first['high']:g}"
        )
    values.setdefault("name", pathlib.Path(where).stem)
    rates = found.get("rates", {})
    if not isinstance(rates, dict) or not all(isinstance(pair, list) for pair in rates.values()):
        raise ConfigError(f"{where}: rates must be a table, and each value a list of two rates")
    values["rates"] = {str(name)[:20]: tuple(pair[:3]) for name, pair in rates.items()}
    return MachineSpec(**values)


def machine_named(name: str) -> MachineSpec:
    """The machine of a file, or of the catalogue by name. Raises ConfigError if there is none."""
    path = pathlib.Path(name)
    if path.suffix == ".toml" or "/" in name:
        return read_machine_file(path)
    known = catalogue_names()
    if name not in known:
        guess = did_you_mean(name, known, 0.5) or "."
        raise ConfigError(
            f"machine {name[:100]!r} is not known{guess} Give a .toml file, `this`, or one of {', '.join(known)}"
        )
    return read_machine_file(CATALOGUE / f"{name}.toml")


def kept_path() -> pathlib.Path | None:
    """The file for measurements of this machine; None if the user has no home folder."""
    try:
        return cache_folder() / f"machine-{METHOD}.toml"
    except RuntimeError:
        return None


def kept_machine(name: str, isa: str) -> MachineSpec | None:
    """The stored measurements of a machine, by name and instruction set level; None without a valid file."""
    path = kept_path()
    if path is None or not path.is_file():
        return None
    try:
        found = read_machine_file(path)
    except ConfigError:  # such as the file of an earlier version
        return None
    return found if (found.name, found.isa) == (name, isa) else None


def catalogue_names() -> list[str]:
    """Names of the machines from public data sheets."""
    return sorted(path.stem for path in CATALOGUE.glob("*.toml"))


def _section(item: Any) -> str:
    return item.metadata["section"]


def _unknown(names: list[tuple[str, str]], known: Mapping[str, Any]) -> str:
    """The message for names that no figure has, all of them in one line."""
    shown = [f"{section}.{name}" if section else name for section, name in names]
    if len(names) == 1:
        full = [f"{_section(item)}.{name}".lstrip(".") for name, item in known.items()]
        return f"{shown[0][:100]} is not known{did_you_mean(shown[0], full, 0.5)}"
    return (
        f"{', '.join(shown)[:400]} are not known; a file of an earlier version is replaced by "
        "`ckdist bench machine --save FILE`"
    )


def _value(item: Any, value: Any, where: str) -> Any:
    """Checks a value of the file and converts it to the kind of its field."""
    full = f"{_section(item)}.{item.name}".lstrip(".")
    if item.metadata["kind"] is str:
        if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
            raise ConfigError(f"{where}: {full} must be a text of one line")
        return value
    if item.metadata["kind"] is tuple:
        if not isinstance(value, list) or not all(isinstance(pair, list) for pair in value):
            raise ConfigError(f"{where}: {full} must be a list of pairs")
        pairs = tuple(tuple(pair[:3]) for pair in value[: MAX_TYPES + 1])
        _check_barrier(where, pairs)
        return pairs
    return checked(item, value, f"{where}: {full}")


def _check_barrier(where: str, pairs: Any) -> None:
    """Raises ConfigError if pairs of threads and seconds are invalid, too many, or out of order."""
    if len(pairs) > MAX_TYPES or not all(len(pair) == 2 for pair in pairs):
        raise ConfigError(f"{where}: steps.barrier must be at most {MAX_TYPES} pairs of threads and seconds")
    for pair in pairs:
        for value, low, high in zip(pair, (1, 0.0), (1 << 20, 1.0), strict=True):
            checked_value({"low": low, "high": high, "kind": float}, value, f"{where}: steps.barrier")
    if any(more <= threads for (threads, _), (more, _) in itertools.pairwise(pairs)):
        raise ConfigError(f"{where}: steps.barrier needs growing numbers of threads")
