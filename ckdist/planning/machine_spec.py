"""The figures of a machine for plans: rates of its memory, cores, ranks and links. Reads and writes them as TOML.

`ckdist bench machine --save FILE` measures a machine. `machines/` has some from public data sheets. Units are bytes,
operations and seconds. A multiply-add is two operations.
"""

import difflib
import itertools
import math
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import numpy as np

from ckdist.comm.thresholds import cache_folder
from ckdist.comm.transports.link import Link
from ckdist.config.options import checked, checked_value, option
from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file
from ckdist.topology.bandwidth import METHOD
from ckdist.weights.packed_type import activation_format

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CATALOGUE = pathlib.Path(__file__).parent / "machines"
MAX_FILE_BYTES = 1 << 20
MAX_TYPES = 256
INT8_FORM = 2  # activation format int8, as in native/kernels
PRODUCT_ROWS = (1, 4, 16, 64, 256)  # rows of measured products
LEAST_ROWS = 8  # for products without a measurement: fewer rows take as long, since weights are unpacked anyway
MEASURED, DATA_SHEET = "measured", "data sheet, not measured"
MAX_REUSE = 64
REUSE = "pairs (bytes between two uses, bytes/s): read rate of a node by reuse distance"


def fact(section: str, help: str, low: float, high: float, default: Any = MISSING, kind: type = float) -> Any:
    """A number in a section of the file, with its range. Without a default it is required."""
    return option(default, help=help, low=low, high=high, kind=kind, facets={"section": section})


def words(help: str, default: str = "") -> Any:
    """A text before the first section of the file."""
    return option(default, help=help, facets={"section": ""})


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """One host: its NUMA nodes, with one rank each, and its link to identical hosts.

    `products` maps a weight type to operations per second of one core, all cores at work, in products of PRODUCT_ROWS
    rows with weights from a cache. Rates of other types are derived from the section `arithmetic`.
    """

    name: str = words("what it is")
    source: str = words(f"{MEASURED}, or {DATA_SHEET}", DATA_SHEET)
    isa: str = words("level of instructions whose kernels run")
    uncertainty: float = fact("", "share by which a predicted time may be wrong either way", 0.0, 4.0, 0.35)

    sockets: int = fact("host", "packages", 1, 64, 1, int)
    nodes: int = fact("host", "NUMA nodes, with a rank each", 1, 256, 1, int)
    cores: int = fact("host", "cores of a node", 1, 4096, kind=int)
    memory: float = fact("host", "bytes of a node's memory", 1 << 20, 1 << 50)
    watts: float = fact("host", "of the host at work; 0: not known", 0.0, 1e6, 0.0)
    price_per_hour: float = fact("host", "of the host; 0: not known", 0.0, 1e6, 0.0)

    bandwidth: float = fact("memory", "bytes per second of a node's memory at most", 1e6, 1e16)
    achieved_bandwidth: float = fact("memory", "the share of it that reading weights reaches", 0.01, 1.0, 0.8)
    attention_read: float = fact("memory", "of that the share that single tokens reach of caches", 0.01, 4.0, 1.0)
    core_bandwidth: float = fact("memory", "bytes per second that one core reads", 1e6, 1e15, 2e10)
    remote: float = fact("memory", "times longer that reading another node's memory takes", 1.0, 100.0, 2.0)
    reuse: tuple[tuple[float, float], ...] = field(
        default=(), metadata={"section": "memory", "help": REUSE, "kind": tuple}
    )

    f32: float = fact("arithmetic", "operations per second of one core with float32", 1e6, 1e18)
    bf16: float = fact("arithmetic", "the same with bfloat16", 1e6, 1e18)
    int8: float = fact("arithmetic", "the same with bytes", 1e6, 1e18)
    achieved_arithmetic: float = fact("arithmetic", "the share of it that products reach", 0.01, 1.0, 0.7)
    achieved_experts: float = fact("arithmetic", "the share of that that experts reach", 0.01, 4.0, 1.0)
    achieved_experts_int8: float = fact("arithmetic", "the same with bytes; 0: as others", 0.0, 4.0, 0.0)
    experts_once: float = fact("arithmetic", "seconds of one core for each expert that tokens take", 0.0, 1.0, 0.0)
    heads: float = fact("arithmetic", "numbers per second that heads' products take and give; 0: any", 0.0, 1e15, 0.0)
    heads_int8: float = fact("arithmetic", "the same with bytes; 0: as others", 0.0, 1e15, 0.0)
    heads_once: float = fact("arithmetic", "seconds of each head's product beside these", 0.0, 1.0, 0.0)
    attention: float = fact("arithmetic", "operations per second of one core in attention; 0: as f32", 0.0, 1e18, 0.0)
    attention_scores: float = fact(
        "arithmetic", "its scores per second of one core, beside that; 0: any", 0.0, 1e18, 0.0
    )
    attention_one: float = fact("arithmetic", "operations for single tokens; 0: as attention", 0.0, 1e18, 0.0)
    attention_given: float = fact("arithmetic", "numbers that one core takes and gives for it; 0: any", 0.0, 1e18, 0.0)
    attention_once: float = fact("arithmetic", "seconds of each layer's attention of single tokens", 0.0, 1.0, 0.0)
    latent: float = fact("arithmetic", "operations in latent attention; 0: as attention", 0.0, 1e18, 0.0)
    latent_one: float = fact("arithmetic", "the same for single tokens; 0: as attention_one", 0.0, 1e18, 0.0)
    latent_given: float = fact("arithmetic", "the same as attention_given; 0: as that", 0.0, 1e18, 0.0)
    latent_once: float = fact("arithmetic", "the same as attention_once; 0: as that", 0.0, 1.0, 0.0)
    elementwise: float = fact("arithmetic", "numbers per second of one core in norms and gates", 1e3, 1e15, 4e9)
    overlap_loss: float = fact("arithmetic", "of reading and computing the hidden part that costs", 0.0, 4.0, 0.25)
    rows_loss: float = fact("arithmetic", "the same of products of several rows; 0: as of one", 0.0, 4.0, 0.0)

    training: float = fact("training", "the share of a product's rate that those of training reach", 0.01, 4.0, 1.0)
    training_attention: float = fact("training", "operations per second of one core in its attention", 0.0, 1e18, 0.0)
    training_keys: float = fact("training", "keys of a token that the rest of its attention is worth", 0.0, 1e6, 0.0)
    training_elementwise: float = fact("training", "numbers per second of one core in its row steps", 0.0, 1e15, 0.0)
    training_packing: float = fact("training", "times the rate of reading weights, that packing has", 0.01, 100.0, 1.0)
    training_optimizer: float = fact("training", "the same of the optimizer", 0.01, 100.0, 1.0)

    barrier: float = fact("steps", "seconds of a barrier of a node's threads", 0.0, 1.0, 2e-6)
    between: float = fact("steps", "seconds between two steps", 0.0, 10.0, 3e-4)
    between_far: float = fact("steps", "the same of those that read the most; 0: as that", 0.0, 10.0, 0.0)

    rank_seconds: float = fact("ranks", "seconds in which ranks of a host meet", 0.0, 1.0, 2e-6)
    rank_core_rate: float = fact("ranks", "bytes per second of one core from another rank's memory", 1e3, 1e15, 8e9)
    rank_rate: float = fact("ranks", "the same of a rank at most", 1e3, 1e15, 5e10)

    link_seconds: float = fact("link", "seconds of a message between hosts", 0.0, 10.0, 3e-5)
    link_rate: float = fact("link", "bytes per second between hosts", 1e3, 1e15, 1.25e9)

    products: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = self.name or "the machine"
        if not self.isa:
            raise ConfigError(f"{where} has no isa: give the level of instructions whose kernels run, as avx2 or amx")
        activation_format(0, self.isa)  # ConfigError if the level is not known
        for item in fields(self):
            if item.metadata.get("kind") in (int, float):
                checked(item, getattr(self, item.name), f"{where}: {item.name}")
        if self.nodes % self.sockets:
            raise ConfigError(f"{where}: host.nodes {self.nodes} is not a multiple of host.sockets {self.sockets}")
        _check_reuse(where, self.reuse)
        if len(self.products) > MAX_TYPES:
            raise ConfigError(f"{where}: products has {len(self.products)} types, more than the {MAX_TYPES} allowed")
        for name, rates in self.products.items():
            if len(rates) != len(PRODUCT_ROWS):
                raise ConfigError(
                    f"{where}: products.{name} has {len(rates)} rates, and needs {len(PRODUCT_ROWS)}: "
                    f"of products of {', '.join(map(str, PRODUCT_ROWS))} rows"
                )
            for rate in rates:
                checked_value({"low": 1e3, "high": 1e18, "kind": float}, rate, f"{where}: products.{name}")

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

    def read_rate(self, cores: int, ranks: int = 1, between: float = math.inf) -> float:
        """Bytes of weights per second that `cores` cores read from their node, which `ranks` ranks share.

        `between`: bytes that a rank reads between two uses of a byte. If they are few, the byte is still in the cache.
        """
        cached = self.reuse_rate(between * ranks)
        core = max(self.core_bandwidth, cached / self.cores)
        return min(core * cores, max(self.bandwidth * self.achieved_bandwidth, cached) / ranks)

    def reuse_rate(self, between: float) -> float:
        """Bytes per second that the node's cores read from the cache, if `between` bytes are read between two uses.

        Interpolates measured rates, linear in logarithms. 0 beyond the last one: nothing is in the cache then.
        """
        if not self.reuse or between > self.reuse[-1][0]:
            return 0.0
        at = [math.log(max(1.0, size)) for size, _ in self.reuse]
        rates = [math.log(rate) for _, rate in self.reuse]
        return math.exp(np.interp(math.log(max(1.0, between)), at, rates))

    def product_rate(self, kind: str, form: int, rows: float) -> float:
        """Operations per second of one core in products of `rows` rows with weights of type `kind`.

        `form` is the activation format. Interpolates measured rates, linear in logarithms.
        """
        if kind not in self.products:
            return (self.f32, self.bf16, self.int8)[form] * self.achieved_arithmetic * min(1.0, rows / LEAST_ROWS)
        rates = self.products[kind]
        at = math.log(min(max(rows, PRODUCT_ROWS[0]), PRODUCT_ROWS[-1]))
        for low, high, slow, fast in zip(PRODUCT_ROWS, PRODUCT_ROWS[1:], rates, rates[1:], strict=False):
            if rows <= high or high == PRODUCT_ROWS[-1]:
                part = (at - math.log(low)) / (math.log(high) - math.log(low))
                return slow * (fast / slow) ** part
        return rates[-1]

    def heads_rate(self, form: int) -> float:
        """Inputs and outputs per second of one core in products of single heads, by activation format."""
        return (self.heads_int8 if form == INT8_FORM else 0.0) or self.heads or math.inf

    def with_product(self, kind: str, index: int, rate: float) -> "MachineSpec":
        """A copy with another rate for products of a type with PRODUCT_ROWS[index] rows."""
        rates = list(self.products[kind])
        rates[index] = rate
        return replace(self, products={**self.products, kind: tuple(rates)})

    def product_loss(self, rows: float) -> float:
        """The fraction of the shorter of reading and computing that is not hidden, in products of `rows` rows.

        Interpolates between 1 and PRODUCT_ROWS[1] rows, linear in the logarithm of rows.
        """
        part = min(1.0, math.log(max(rows, 1.0)) / math.log(PRODUCT_ROWS[1]))
        return self.overlap_loss + part * ((self.rows_loss or self.overlap_loss) - self.overlap_loss)

    def between_steps(self, read: float) -> float:
        """Seconds between two steps that read `read` bytes each: linear from `between` to `between_far`.

        The more bytes a step reads, the more of Python's data it evicts from the caches.
        """
        if not self.reuse or not self.between_far:
            return self.between
        return self.between + min(1.0, read / self.reuse[-1][0]) * (self.between_far - self.between)

    def experts_share(self, form: int) -> float:
        """The fraction of a product's rate that products with experts reach, by activation format."""
        return (self.achieved_experts_int8 if form == INT8_FORM else 0.0) or self.achieved_experts

    def attention_start(self, latent: bool = False) -> float:
        """Fixed seconds per layer of attention of single tokens, independent of their number."""
        return (self.latent_once if latent else 0.0) or self.attention_once

    def token_rate(self, latent: bool = False) -> float:
        """Inputs and outputs per second of one core in attention of single tokens."""
        return (self.latent_given if latent else 0.0) or self.attention_given or math.inf

    def attention_rate(self, latent: bool = False, single: bool = False) -> float:
        """Operations per second of one core in attention. `latent`: over latent vectors. `single`: of single tokens."""
        whole = self.attention or self.f32 * self.achieved_arithmetic
        one = self.attention_one or whole
        return (self.latent_one or one if single else self.latent or whole) if latent else one if single else whole

    def toml(self) -> str:
        """The text of this machine's file."""
        lines, section = [], ""
        for item in fields(self):
            if item.name == "products":
                continue
            if item.metadata["section"] != section:
                section = item.metadata["section"]
                lines += ["", f"[{section}]"]
            value = getattr(self, item.name)
            if value == ():
                continue
            shown = (
                _quoted(value)
                if isinstance(value, str)
                else f"{value:.6g}"
                if item.metadata["kind"] is float
                else [[float(f"{number:.4g}") for number in pair] for pair in value]
                if item.metadata["kind"] is tuple
                else value
            )
            lines.append(f"{item.name} = {shown}  # {item.metadata['help']}")
        if self.products:
            rows = ", ".join(map(str, PRODUCT_ROWS))
            lines += ["", f"[products]  # operations per second of one core, in products of {rows} rows"]
            lines += [
                f"{name} = [{', '.join(f'{rate:.4g}' for rate in rates)}]" for name, rates in self.products.items()
            ]
        return "\n".join(lines) + "\n"


def read_machine_file(path: pathlib.Path) -> MachineSpec:
    """Reads a TOML file. Raises ConfigError if it cannot be read, lacks a number, or has one out of range."""
    where = str(path)
    try:
        found = tomllib.loads(read_text_file(where, where, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML: {str(error)[:200]}") from None
    return machine_of(found, where)


def machine_of(found: Mapping[str, Any], where: str) -> MachineSpec:
    """The machine with the tables of a file. Raises ConfigError, which begins with `where`."""
    facts = {item.name: item for item in fields(MachineSpec) if item.name != "products"}
    sections = {item.metadata["section"] for item in facts.values()} - {""}
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name == "products":
            values["products"] = _products(value, where)
        elif name in sections:
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {name} is {value!r:.50}; it must be a table")
            values |= {key: _value(facts, name, key, each, where) for key, each in value.items()}
        else:
            values[name] = _value(facts, "", name, value, where)
    missing = [item for item in facts.values() if item.name not in values and item.default is MISSING]
    if missing:
        first = missing[0].metadata
        raise ConfigError(
            f"{where} has no {first['section']}.{missing[0].name}: give the {first['help']}, "
            f"from {first['low']:g} to {first['high']:g}"
        )
    values.setdefault("name", pathlib.Path(where).stem)
    return MachineSpec(**values)


def machine_named(name: str) -> MachineSpec:
    """The machine of a file, or of the catalogue by name. Raises ConfigError if there is none."""
    path = pathlib.Path(name)
    if path.suffix == ".toml" or "/" in name:
        return read_machine_file(path)
    known = catalogue_names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        guess = f", did you mean {close[0]}?" if close else "."
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
    except ConfigError:
        return None
    return found if (found.name, found.isa) == (name, isa) else None


def catalogue_names() -> list[str]:
    """Names of the machines from public data sheets."""
    return sorted(path.stem for path in CATALOGUE.glob("*.toml"))


def _value(facts: Mapping[str, Any], section: str, name: str, value: Any, where: str) -> Any:
    """Checks a value of the file and converts it to the kind of its field."""
    full = f"{section}.{name}" if section else name
    item = facts.get(name)
    if item is None or item.metadata["section"] != section:
        close = difflib.get_close_matches(name, facts, n=1, cutoff=0.6)
        guess = f", did you mean {facts[close[0]].metadata['section']}.{close[0]}?" if close else ""
        raise ConfigError(f"{where}: {full[:100]} is not known{guess}")
    if item.metadata["kind"] is str:
        if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
            raise ConfigError(f"{where}: {full} must be a text of one line")
        return value
    if item.metadata["kind"] is tuple:
        if not isinstance(value, list) or not all(isinstance(pair, list) for pair in value):
            raise ConfigError(f"{where}: {full} must be a list of pairs")
        pairs = tuple(tuple(pair[:3]) for pair in value[: MAX_REUSE + 1])
        _check_reuse(where, pairs)
        return pairs
    return checked(item, value, f"{where}: {full}")


def _check_reuse(where: str, pairs: Any) -> None:
    """Raises ConfigError if pairs of bytes and rates are invalid, too many, or out of order."""
    if len(pairs) > MAX_REUSE or not all(len(pair) == 2 for pair in pairs):
        raise ConfigError(f"{where}: memory.reuse must be at most {MAX_REUSE} pairs of bytes and bytes per second")
    for pair in pairs:
        for value, low in zip(pair, (1, 1e6), strict=True):
            checked_value({"low": low, "high": 1e16, "kind": float}, value, f"{where}: memory.reuse")
    for (size, rate), (larger, slower) in itertools.pairwise(pairs):
        if larger <= size or slower > rate:
            raise ConfigError(
                f"{where}: memory.reuse has {rate:g} bytes/s at {size:g} and {slower:g} at {larger:g} bytes: sizes "
                "must grow, and rates must not"
            )


def _products(value: Any, where: str) -> dict[str, tuple[float, ...]]:
    if not isinstance(value, dict) or not all(isinstance(rates, list) for rates in value.values()):
        raise ConfigError(f"{where}: products must be a table of lists")
    return {str(name)[:20]: tuple(rates[: 2 * len(PRODUCT_ROWS)]) for name, rates in value.items()}


def _quoted(text: str) -> str:
    """A TOML string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


__all__ = [
    "CATALOGUE",
    "MachineSpec",
    "catalogue_names",
    "kept_machine",
    "kept_path",
    "machine_named",
    "machine_of",
    "read_machine_file",
]
