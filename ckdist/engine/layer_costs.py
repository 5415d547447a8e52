"""What a layer costs with tokens cut and with tensors cut, on these ranks of this machine: measured once, kept in the user's cache.

The first layer of the model itself is the measure: operations at so many rows, bytes of weights, bytes exchanged, barriers and the
noise of the neighbours are all in it, as they are here. Terms that are measured apart and added up miss it by a tenth (reading and
computing overlap), where the two ways differ by a few hundredths. It chooses nothing.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import statistics
import time
from dataclasses import dataclass

import numpy as np

from ckdist import __version__, native
from ckdist.comm.host_name import machine_name
from ckdist.comm.thresholds import cache_folder
from ckdist.program.batch import BLOCK_TOKENS, Batch
from ckdist.program.executable import DECODE, PREFILL, Executable
from ckdist.topology import this_machine

LEAST_TOKENS = 8  # of a step that is worth asking about
MOST_SIZES = 24
ROUNDS, MOST_ROUNDS = 5, 100
# After which no layer is begun, in the first rounds and in those that are added where these did not decide. A start takes so much longer at most, and a layer
# twice both ways; where neighbours are quiet, of a model of a few GB, about half a second.
SECONDS, MORE_SECONDS = 5.0, 2.0
WON, LOST = 0.99, 1.01  # ratios of seconds that decide
EVEN = 0.95, 1.05  # between them the choice matters so little that nothing more precise is asked for
KEPT_FILES = 64


@dataclass(frozen=True)
class LayerCosts:
    """`sizes`: tokens of a step, ascending. By phase, and for each size: median `seconds` of a layer, and bytes that rank 0 reads of others.

    `ratios`: of TOKEN's seconds to TENSOR's, over rounds in which one ran right after the other, so what slows the whole machine for a while is not in
    them: the median, between the bounds within which it lies with 95 % (`median_within`). `rounds`: how many there were, at least.
    """

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    moved: tuple[tuple[int, ...], tuple[int, ...]]
    ratios: tuple[tuple[float, float, float], ...]  # low, median, high
    rounds: int

    @property
    def certain(self) -> bool:
        """Another measurement would say the same: for every size one way surely won, or the choice hardly matters."""
        return self.rounds >= ROUNDS and all(map(_decided, self.ratios))

    def predicted(self, phase: int, tokens: int) -> float:
        """Seconds of a layer for a step of so many tokens: between the sizes on a line, beyond them in proportion."""
        inside = min(max(tokens, self.sizes[0]), self.sizes[-1])
        return float(np.interp(inside, self.sizes, self.seconds[phase])) * max(1.0, tokens / inside)


def measure(executable: Executable) -> LayerCosts:
    """On rank 0, while the others work, and with nothing in the cache. Sizes are halves of the largest step, from that one down."""
    sizes = [largest_step(executable)]
    while sizes[-1] // 2 >= LEAST_TOKENS:
        sizes.append(sizes[-1] // 2)
    for phase in (DECODE, PREFILL):
        _layer(executable, sizes[0], phase)  # the layer is packed, and pages and caches are warm, from here on
    seconds = {size: ([], []) for size in sizes}
    moved: dict[int, list[int]] = {}
    began = time.monotonic()
    within = lambda size: median_within([token / tensor for tensor, token in zip(*seconds[size])])
    for turn in range(MOST_ROUNDS):
        for size in sizes:
            if moved and time.monotonic() - began > (SECONDS if turn < ROUNDS else MORE_SECONDS):
                break
            if turn >= ROUNDS and _decided(within(size)):
                continue
            moved[size] = [0, 0]
            for phase in (DECODE, PREFILL) if turn % 2 else (PREFILL, DECODE):
                took, moved[size][phase] = _layer(executable, size, phase)
                seconds[size][phase].append(took)
    executable.times(reset=True)
    known = sorted(moved)
    medians = tuple(tuple(statistics.median(seconds[size][phase]) for size in known) for phase in (DECODE, PREFILL))
    ratios = tuple(within(size) for size in known)
    counts = tuple(tuple(moved[size][phase] for size in known) for phase in (DECODE, PREFILL))
    return LayerCosts(tuple(known), medians, counts, ratios, min(len(seconds[size][DECODE]) for size in known))


def median_within(values: list[float]) -> tuple[float, float, float]:
    """The median, and before and after it the values between which the median of what they are drawn from lies with 93 to 98 %, as the sign test has it.

    Fewer than five values cannot say that: then the least and the largest, which hold it less often.
    """
    ordered, n = sorted(values), len(values)
    left_out = max(0, int((n + 1) / 2 - 0.98 * math.sqrt(n)) - 1)  # on each side; the normal approximation of the binomial's quantile
    return ordered[left_out], statistics.median(ordered), ordered[n - 1 - left_out]


def _decided(ratio: tuple[float, float, float]) -> bool:
    low, _, high = ratio
    return high <= WON or low >= LOST or EVEN[0] <= low and high <= EVEN[1]


def largest_step(executable: Executable) -> int:
    """Tokens of one sequence that a step can have."""
    return min(executable.max_tokens, executable.context_length, executable.num_blocks * BLOCK_TOKENS)


def _layer(executable: Executable, size: int, phase: int) -> tuple[float, int]:
    """Seconds of the first layer, and the bytes that it reads of other ranks."""
    ids = np.arange(size, dtype=np.int32) % executable.vocab_size
    blocks = np.arange(-(-size // BLOCK_TOKENS), dtype=np.int32)
    executable.times(reset=True)
    executable.run_layer(Batch(ids, np.array([[size, 0, len(blocks)]], np.int32), blocks, np.zeros(0, np.int32)), phase)
    times = executable.times()
    return times.total, times.moved


def key_of(world, plan, executable: Executable, program: str, types: list[int]) -> dict:
    """All that costs depend on: machines, ranks and their places, build, and the model's shape and types; a collective call."""
    places = world.gather([this_machine().model, plan.threads_batch, list(plan.placement.cpus), list(plan.placement.memory)])
    return {
        "hosts": [machine_name(host) for host in world.hosts],
        "wire": executable.group.kind,
        "isa": native.ffi.string(native.lib.ckdist_isa()).decode(),
        "version": __version__,
        "library": hashlib.sha256(native.LIBRARY.read_bytes()).hexdigest(),
        "places": places,
        "program": program,
        "types": types,
        "cache_type": plan.limits.kv_type,
        "tokens": largest_step(executable),
    }


def path_of(key: dict) -> pathlib.Path:
    return cache_folder() / "prefill" / f"{hashlib.sha256(_json(key).encode()).hexdigest()[:32]}.json"


def load_costs(key: dict) -> LayerCosts | None:
    """What was kept for `key`; None where nothing was, or what is there does not make sense."""
    try:
        with open(path_of(key), encoding="utf-8") as file:
            found = json.loads(file.read(1 << 20))
        costs = found["costs"]
        costs = LayerCosts(*(_frozen(costs[field.name]) for field in dataclasses.fields(LayerCosts)))
        return costs if found["key"] == json.loads(_json(key)) and _sound(costs) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, RuntimeError):
        return None


def save_costs(key: dict, costs: LayerCosts) -> pathlib.Path | None:
    """Where they are kept now; None where that cannot be, or where they are not certain."""
    if not costs.certain:
        return None
    try:
        path = path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(_json({"key": key, "costs": dataclasses.asdict(costs)}), encoding="utf-8")
        os.replace(temporary, path)
        for old in sorted(path.parent.glob("*.json"), key=os.path.getmtime)[:-KEPT_FILES]:
            old.unlink()
        return path
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        with contextlib.suppress(OSError, NameError):
            temporary.unlink()
        return None


def _json(value) -> str:
    return json.dumps(value, sort_keys=True)


def _frozen(value):
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def _sound(costs: LayerCosts) -> bool:
    count = len(costs.sizes)
    rows = [*costs.seconds, *costs.moved, costs.ratios]
    numbers = [*costs.sizes, *costs.seconds[0], *costs.seconds[1], *(number for low, ratio, high in costs.ratios for number in (low, ratio, high))]
    return (
        0 < count <= MOST_SIZES
        and list(costs.sizes) == sorted(set(costs.sizes))
        and len(rows) == 5
        and all(len(row) == count for row in rows)
        and all(type(n) in (int, float) and math.isfinite(n) and n > 0 for n in numbers)
        and all(low <= ratio <= high for low, ratio, high in costs.ratios)
        and all(type(n) is int for n in (*costs.sizes, *costs.moved[0], *costs.moved[1], costs.rounds))
    )


__all__ = ["LayerCosts", "key_of", "load_costs", "measure", "path_of", "save_costs"]
