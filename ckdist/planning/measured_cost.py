"""Measures the cost of a layer, token-parallel and tensor-parallel, on these ranks. Stored in the user's cache.

It runs the first layer of the model itself, so all costs are included: operations, bytes of weights, exchange,
barriers, and other processes on the machine. Sizes are tested from the largest step down. If token-parallel is not
surely faster for the largest step, smaller ones are not tested. So several sizes do not have a higher chance of error
than one (fixed-sequence testing).
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
from ckdist.comm.user_cache import cache_path
from ckdist.comm.world_protocol import World
from ckdist.planning.paired_test import FASTER, LOOKS, NO_FASTER, NOISY, look, median_within
from ckdist.planning.rank_plan import Plan
from ckdist.program.executable import DECODE, PREFILL, Executable
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots
from ckdist.topology import this_machine
from ckdist.topology.binding import times_preempted

LEAST_TOKENS = 8  # smallest measured step
MOST_SIZES = 24
SECONDS = 6.0  # time limit of a measurement, except for one pair; on a quiet machine it takes a tenth
LEAST_PAIRS = 6  # fewest pairs with a result: 6 equal signs have a chance of 1 in 64
KEPT_FILES = 64


@dataclass(frozen=True)
class LayerCosts:
    """Measured costs of a layer. Each field has an entry per size; `seconds` and `moved` have one such list per phase.

    Attributes:
        sizes: Tokens of the measured steps, ascending.
        seconds: Median seconds of a layer.
        moved: Bytes that rank 0 reads from other ranks.
        ratios: (low, median, high) of token-parallel / tensor-parallel seconds over pairs of consecutive runs. The true
            median is between low and high with 95 % (`median_within`).
        pairs: Number of pairs that count.
        verdicts: Result of `paired_test.look`.
    """

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    moved: tuple[tuple[int, ...], tuple[int, ...]]
    ratios: tuple[tuple[float, float, float], ...]
    pairs: tuple[int, ...]
    verdicts: tuple[str, ...]

    @property
    def certain(self) -> bool:
        """Whether another measurement would have the same result."""
        return all(verdict in (FASTER, NO_FASTER) for verdict in self.verdicts)

    @property
    def from_tokens(self) -> int:
        """The smallest size from which on token-parallel is faster; sys.maxsize: none.

        It must be surely faster at the largest size. Below, a size that is too noisy counts as faster.
        """
        found = sys.maxsize
        for size, verdict in reversed(list(zip(self.sizes, self.verdicts, strict=True))):
            if verdict == FASTER or (verdict == NOISY and found < sys.maxsize):
                found = size
            else:
                break
        return found

    def predicted(self, phase: int, tokens: int) -> float:
        """Seconds of a layer in a step of `tokens` tokens: linear between the sizes, proportional beyond them."""
        inside = min(max(tokens, self.sizes[0]), self.sizes[-1])
        return float(np.interp(inside, self.sizes, self.seconds[phase])) * tokens / inside


def sizes_of(executable: Executable) -> list[int]:
    """Tokens of the steps that can be measured: the largest step, then halves of it."""
    sizes = [largest_step(executable)]
    while sizes[-1] // 2 >= LEAST_TOKENS:
        sizes.append(sizes[-1] // 2)
    return sizes


def measure(
    executable: Executable, gains: dict[int, float | None], clock: Callable[[], float] = time.monotonic
) -> LayerCosts:
    """Measures on rank 0, while the other ranks are in `work()` and the cache is empty.

    `gains`: size -> fraction of the time that token-parallel is expected to save (None: not known), from the largest
    size down. The measurement of a size stops early if noise would hide that gain in the pairs that fit the time limit.
    """
    largest = _prompt(executable, max(gains))
    for phase in (DECODE, PREFILL):
        _layer(executable, largest, phase)  # warm-up: packs the layer, touches pages and caches
    rows, end = [], clock() + SECONDS
    for size, gain in gains.items():
        # Half of the time that is left: half the tokens take half the time, so each size gets equally many pairs.
        rows.append(_measure_size(executable, size, gain, (end - clock()) / 2, clock))
        if rows[-1][-1] not in (FASTER, NOISY) or rows[0][-1] != FASTER:
            break
    executable.stats(reset=True)
    sizes, tensor, token, tensor_bytes, token_bytes, ratios, pairs, verdicts = zip(*sorted(rows), strict=True)
    return LayerCosts(sizes, (tensor, token), (tensor_bytes, token_bytes), ratios, pairs, verdicts)


def _measure_size(
    executable: Executable, size: int, gain: float | None, seconds: float, clock: Callable[[], float]
) -> tuple[Any, ...]:
    """Measures pairs of runs for up to `seconds` seconds. Pairs in which this rank was preempted do not count.

    Returns (size, median seconds by phase, bytes by phase, ratios, pairs, verdict).
    """
    prompt = _prompt(executable, size)
    took, moved, all_logs, logs = ([], []), [0, 0], [], []
    began, verdict = clock(), None
    while verdict is None:
        before = times_preempted()
        for phase in (DECODE, PREFILL) if len(all_logs) % 2 else (PREFILL, DECODE):
            one, moved[phase] = _layer(executable, prompt, phase)
            took[phase].append(one)
        all_logs.append(math.log(took[PREFILL][-1] / took[DECODE][-1]))
        undisturbed = times_preempted() == before
        if undisturbed:
            logs.append(all_logs[-1])
        spent = clock() - began
        most = min(LOOKS[-1], int(len(logs) * seconds / max(spent, 1e-9)))
        if spent > seconds or (len(all_logs) >= LOOKS[0] and most < LOOKS[0]):
            verdict = look(logs, True, gain) if len(logs) >= LEAST_PAIRS else NOISY
        elif undisturbed and len(logs) in LOOKS:
            verdict = look(logs, len(logs) == LOOKS[-1], gain, most)
    ratios = tuple(math.exp(value) for value in median_within(logs or all_logs))
    return size, *map(statistics.median, took), *moved, ratios, len(logs), verdict


def largest_step(executable: Executable) -> int:
    """The most tokens of one sequence in a step."""
    return min(executable.max_tokens, executable.context_length, executable.num_blocks * BLOCK_TOKENS)


def _prompt(executable: Executable, size: int) -> Batch:
    """A batch with one sequence of `size` tokens, without context and without logits."""
    ids = np.arange(size, dtype=np.int32) % executable.vocab_size
    blocks = np.arange(-(-size // BLOCK_TOKENS), dtype=np.int32)
    chunk = np.array([[size, 0, len(blocks)]], np.int32)
    return Batch(ids, chunk, blocks, np.zeros(0, np.int32), own_slots(executable.state_slots, range(1), 0))


def _layer(executable: Executable, prompt: Batch, phase: int) -> tuple[float, int]:
    """(seconds of the first layer, bytes that it reads from other ranks)."""
    executable.stats(reset=True)
    executable.run_layer(prompt, phase)
    times = executable.stats()
    return times.total, times.moved


def key_of(world: World, plan: Plan, executable: Executable, program: str, types: list[int]) -> dict[str, Any]:
    """All properties that costs depend on: machines, ranks and placement, build, shape and types of the model.

    A collective call.
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
    """The file of the costs for `key`. Raises OSError if there can be no file."""
    return cache_path(f"prefill/{hashlib.sha256(_json(key).encode()).hexdigest()[:32]}.json", writing)


def load_costs(key: dict[str, Any]) -> LayerCosts | None:
    """The stored costs for `key`; None if there are none, or the file is invalid."""
    try:
        with open(path_of(key), encoding="utf-8") as file:
            found = json.loads(file.read(1 << 20))
        costs = found["costs"]
        costs = LayerCosts(*(_frozen(costs[field.name]) for field in dataclasses.fields(LayerCosts)))
        return costs if found["key"] == json.loads(_json(key)) and _sound(costs) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def save_costs(key: dict[str, Any], costs: LayerCosts) -> pathlib.Path | None:
    """Stores costs and returns the file; None if they are not certain or cannot be written."""
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
    """A canonical JSON text."""
    return json.dumps(value, sort_keys=True)


def _frozen(value: Any) -> Any:
    """Converts lists, also nested ones, to tuples."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def _sound(costs: LayerCosts) -> bool:
    """Whether costs from a file are valid."""
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
