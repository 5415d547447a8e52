"""What a layer costs token-parallel and tensor-parallel, on these ranks of this machine: measured once, kept in the
user's cache.

The first layer of the model itself is the measure: operations at so many rows, bytes of weights, bytes exchanged,
barriers and the noise of the neighbours are all in it, as they are here. Sizes are tested from the largest step down.
Where the largest is not surely faster token-parallel the others are not asked, so several sizes have no more chance of
error than one (a fixed sequence of tests).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist import __version__, native
from ckdist.comm.host_name import machine_name
from ckdist.comm.protocol import World
from ckdist.comm.user_cache import cache_path
from ckdist.planning.paired_test import FASTER, LOOKS, NO_FASTER, NOISY, look, median_within
from ckdist.planning.plan import Plan
from ckdist.program.batch import BLOCK_TOKENS, Batch, own_slots
from ckdist.program.executable import DECODE, PREFILL, Executable
from ckdist.topology import this_machine
from ckdist.topology.binding import times_preempted

LEAST_TOKENS = 8  # of a step that is worth asking about
MOST_SIZES = 24
SECONDS = 6.0  # that a measurement takes at most, but for one pair; where neighbours are quiet, a tenth
LEAST_PAIRS = 6  # that can say anything: all of one sign have a chance of 1 in 64
KEPT_FILES = 64


@dataclass(frozen=True)
class LayerCosts:
    """`sizes`: tokens of the steps that were measured, ascending. By phase, and for each size: median `seconds` of a
    layer, and bytes that rank 0 reads of others.

    `ratios`: of token-parallel's seconds to tensor-parallel's, over pairs of runs right after one another: the median,
    between the bounds within which it lies with 95 % (`median_within`). `pairs`: how many counted. `verdicts`:
    whether token-parallel is surely FASTER, as of `paired_test`.
    """

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    moved: tuple[tuple[int, ...], tuple[int, ...]]
    ratios: tuple[tuple[float, float, float], ...]  # low, median, high
    pairs: tuple[int, ...]
    verdicts: tuple[str, ...]

    @property
    def certain(self) -> bool:
        """Another measurement would say the same."""
        return all(verdict in (FASTER, NO_FASTER) for verdict in self.verdicts)

    @property
    def from_tokens(self) -> int:
        """The smallest size on down to which token-parallel is faster: surely at the largest; below, what is too noisy
        is as expected. maxsize: none.
        """
        found = sys.maxsize
        for size, verdict in reversed(list(zip(self.sizes, self.verdicts, strict=True))):
            if verdict == FASTER or (verdict == NOISY and found < sys.maxsize):
                found = size
            else:
                break
        return found

    def predicted(self, phase: int, tokens: int) -> float:
        """Seconds of a layer for a step of so many tokens: between the sizes on a line, beyond them in proportion."""
        inside = min(max(tokens, self.sizes[0]), self.sizes[-1])
        return float(np.interp(inside, self.sizes, self.seconds[phase])) * tokens / inside


def sizes_of(executable: Executable) -> list[int]:
    """Tokens of the steps that can be asked about: halves of the largest step, from that one down."""
    sizes = [largest_step(executable)]
    while sizes[-1] // 2 >= LEAST_TOKENS:
        sizes.append(sizes[-1] // 2)
    return sizes


def measure(
    executable: Executable, gains: dict[int, float | None], clock: Callable[[], float] = time.monotonic
) -> LayerCosts:
    """On rank 0, while the others work, and with nothing in the cache.

    `gains`: the sizes to ask about, from the largest step down, and what share of the time token-parallel is expected
    to save there; None: not known. A size at which noise would hide that gain from as many pairs as there is time for
    is given up early.
    """
    largest = _prompt(executable, max(gains))
    for phase in (DECODE, PREFILL):
        _layer(executable, largest, phase)  # the layer is packed, and pages and caches are warm, from here on
    rows, end = [], clock() + SECONDS
    for size, gain in gains.items():
        # Half of what is left: half as many tokens take half as long, so that each size gets as many pairs.
        rows.append(_measure_size(executable, size, gain, (end - clock()) / 2, clock))
        if rows[-1][-1] not in (FASTER, NOISY) or rows[0][-1] != FASTER:
            break
    executable.stats(reset=True)
    sizes, tensor, token, tensor_bytes, token_bytes, ratios, pairs, verdicts = zip(*sorted(rows), strict=True)
    return LayerCosts(sizes, (tensor, token), (tensor_bytes, token_bytes), ratios, pairs, verdicts)


def _measure_size(
    executable: Executable, size: int, gain: float | None, seconds: float, clock: Callable[[], float]
) -> tuple[Any, ...]:
    """Size, median seconds and bytes both ways, ratios, pairs and verdict, after pairs that take at most so many
    seconds. Pairs in which another process took a core away from this rank do not count.
    """
    prompt = _prompt(executable, size)
    took, moved, every, logs = ([], []), [0, 0], [], []
    began, verdict = clock(), None
    while verdict is None:
        before = times_preempted()
        for phase in (DECODE, PREFILL) if len(every) % 2 else (PREFILL, DECODE):
            one, moved[phase] = _layer(executable, prompt, phase)
            took[phase].append(one)
        every.append(math.log(took[PREFILL][-1] / took[DECODE][-1]))
        undisturbed = times_preempted() == before
        if undisturbed:
            logs.append(every[-1])
        spent = clock() - began
        most = min(LOOKS[-1], int(len(logs) * seconds / max(spent, 1e-9)))
        if spent > seconds or (len(every) >= LOOKS[0] and most < LOOKS[0]):
            verdict = look(logs, True, gain) if len(logs) >= LEAST_PAIRS else NOISY
        elif undisturbed and len(logs) in LOOKS:
            verdict = look(logs, len(logs) == LOOKS[-1], gain, most)
    ratios = tuple(math.exp(value) for value in median_within(logs or every))
    return size, *map(statistics.median, took), *moved, ratios, len(logs), verdict


def largest_step(executable: Executable) -> int:
    """Tokens of one sequence that a step can have."""
    return min(executable.max_tokens, executable.context_length, executable.num_blocks * BLOCK_TOKENS)


def _prompt(executable: Executable, size: int) -> Batch:
    """One sequence of so many tokens, without context before them or logits after them."""
    ids = np.arange(size, dtype=np.int32) % executable.vocab_size
    blocks = np.arange(-(-size // BLOCK_TOKENS), dtype=np.int32)
    chunk = np.array([[size, 0, len(blocks)]], np.int32)
    return Batch(ids, chunk, blocks, np.zeros(0, np.int32), own_slots(executable.state_slots, range(1), 0))


def _layer(executable: Executable, prompt: Batch, phase: int) -> tuple[float, int]:
    """Seconds of the first layer, and the bytes that it reads of other ranks."""
    executable.stats(reset=True)
    executable.run_layer(prompt, phase)
    times = executable.stats()
    return times.total, times.moved


def key_of(world: World, plan: Plan, executable: Executable, program: str, types: list[int]) -> dict[str, Any]:
    """All that costs depend on: machines, ranks and their places, build, and the model's shape and types; a collective
    call.
    """
    places = world.gather(
        [this_machine().model, plan.threads_batch, list(plan.placement.cpus), list(plan.placement.memory)]
    )
    return {
        "hosts": [machine_name(host) for host in world.hosts],
        "transport": executable.communicator.transport,
        "isa": native.isa(),
        "version": __version__,
        "library": hashlib.sha256(native.LIBRARY.read_bytes()).hexdigest(),
        "places": places,
        "program": program,
        "types": types,
        "cache_types": [plan.cache.key_type, plan.cache.value_type],
        "tokens": largest_step(executable),
    }


def path_of(key: dict[str, Any], writing: bool = False) -> pathlib.Path:
    """The file of the costs for `key`. OSError where there can be none."""
    return cache_path(f"prefill/{hashlib.sha256(_json(key).encode()).hexdigest()[:32]}.json", writing)


def load_costs(key: dict[str, Any]) -> LayerCosts | None:
    """What was kept for `key`; None where nothing was, or what is there does not make sense."""
    try:
        with open(path_of(key), encoding="utf-8") as file:
            found = json.loads(file.read(1 << 20))
        costs = found["costs"]
        costs = LayerCosts(*(_frozen(costs[field.name]) for field in dataclasses.fields(LayerCosts)))
        return costs if found["key"] == json.loads(_json(key)) and _sound(costs) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def save_costs(key: dict[str, Any], costs: LayerCosts) -> pathlib.Path | None:
    """Where they are kept now; None where that cannot be, or where another measurement might say otherwise."""
    if not costs.certain:
        return None
    temporary = None
    try:
        path = path_of(key, writing=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(_json({"key": key, "costs": dataclasses.asdict(costs)}), encoding="utf-8")
        temporary.replace(path)
        for old in sorted(path.parent.glob("*.json"), key=os.path.getmtime)[:-KEPT_FILES]:
            old.unlink()
        return path
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return None


def _json(value: Any) -> str:
    """One text for one value."""
    return json.dumps(value, sort_keys=True)


def _frozen(value: Any) -> Any:
    """Lists as tuples, also within one another."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def _sound(costs: LayerCosts) -> bool:
    """Whether what a file said can have been measured."""
    count = len(costs.sizes)
    rows = [*costs.seconds, *costs.moved, costs.ratios, costs.pairs, costs.verdicts]
    numbers = [
        *costs.sizes,
        *costs.seconds[0],
        *costs.seconds[1],
        *(number for low, ratio, high in costs.ratios for number in (low, ratio, high)),
    ]
    return (
        0 < count <= MOST_SIZES
        and list(costs.sizes) == sorted(set(costs.sizes))
        and len(rows) == 7
        and all(len(row) == count for row in rows)
        and all(type(n) in (int, float) and math.isfinite(n) and n > 0 for n in numbers)
        and all(low <= ratio <= high for low, ratio, high in costs.ratios)
        and all(type(n) is int for n in (*costs.sizes, *costs.moved[0], *costs.moved[1], *costs.pairs))
        and all(verdict in (FASTER, NO_FASTER) for verdict in costs.verdicts)
    )


__all__ = ["LayerCosts", "key_of", "largest_step", "load_costs", "measure", "path_of", "save_costs", "sizes_of"]
