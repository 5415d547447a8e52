"""Results of a simulation in numbers: waits, speeds, goodput, and utilisation of the replicas."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist.plan.fleet import Fleet
from ckdist.plan.observed import FAILED, FINISHED, REFUSED, Observed

COLUMNS = 80
PARTS = 0.50, 0.95, 0.99
ENDS = {"finished": FINISHED, "failed": FAILED, "refused": REFUSED}


@dataclass(frozen=True)
class Objective:
    """Limits for a request to count as goodput. None: no limit."""

    first_token: float | None = None  # seconds to the first token
    per_token: float | None = None  # seconds per token after the first, on average

    def kept(self, rows: np.recarray) -> np.ndarray:
        """Returns whether each request of `Observed.table` has finished within the limits: bool (requests,)."""
        kept = rows.how == FINISHED
        if self.first_token is not None:
            kept &= rows.first - rows.arrival <= self.first_token
        if self.per_token is not None:
            kept &= rows.end - rows.first <= self.per_token * np.maximum(rows.output - 1, 0) + 1e-9
        return kept


def report(seen: Observed, fleet: Fleet, seconds: float, objective: Objective) -> dict[str, Any]:
    """Returns the results for all replicas. Requests arrived for `seconds`. Waits are in seconds.

    Rates are over the time in which requests arrived or were answered, whichever is longer.
    """
    rows, scale = seen.table, fleet.replicas / fleet.simulated
    span = max(seconds, seen.end)
    finished, kept = rows.how == FINISHED, objective.kept(rows)
    replica_seconds = span * fleet.simulated
    down = min(seen.failures * fleet.restart, replica_seconds)
    prompt = int(rows.prompt[finished].sum())
    ends = {end: _scaled(int((rows.how == how).sum()), scale) for end, how in ENDS.items()}
    return {
        "replicas": fleet.replicas,
        "replicas_simulated": fleet.simulated,
        "seconds": span,
        "requests": sum(ends.values()),
        **ends,
        "first_token": quantiles((rows.first - rows.arrival)[finished]),
        "between_tokens": {name(part): seen.gaps.quantile(part) for part in PARTS},
        "request": quantiles((rows.end - rows.arrival)[finished]),
        "requests_per_second": float(finished.sum()) * scale / span,
        "output_tokens_per_second": float(rows.output[finished].sum()) * scale / span,
        "prompt_tokens_per_second": prompt * scale / span,
        "cached_part": float(rows.cached[finished].sum()) / prompt if prompt else 0.0,
        "goodput": float(kept.sum()) * scale / span,
        "goodput_part": float(kept.mean()) if len(kept) else None,
        "utilisation": seen.busy / fleet.server.stages / replica_seconds,
        "available": 1 - down / replica_seconds,
        "queue": seen.waiting / replica_seconds,
        "running": seen.running / replica_seconds,
        "longest_queue": seen.longest_queue,
        "steps": _scaled(seen.steps, scale),
        "preemptions": _scaled(seen.preemptions, scale),
        "failures": _scaled(seen.failures, scale),
    }


def quantiles(values: np.ndarray) -> dict[str, float | None]:
    """Returns PARTS and the mean of some values; None for each if there is no value."""
    if not len(values):
        return {**{name(part): None for part in PARTS}, "mean": None}
    found = np.quantile(values, PARTS)
    return {**{name(p): float(v) for p, v in zip(PARTS, found, strict=True)}, "mean": float(values.mean())}


def name(part: float) -> str:
    """Returns the name of a quantile: p95 for 0.95."""
    return f"p{100 * part:.0f}"


def _scaled(count: int, scale: float) -> int:
    """Scales a count of the simulated replicas to all replicas."""
    return round(count * scale)


def lines(found: Mapping[str, Any], objective: Objective) -> list[str]:
    """Formats the report as text."""
    first, gap, whole = found["first_token"], found["between_tokens"], found["request"]
    part = found["replicas_simulated"]
    some = f", {part} of them simulated, the others identical" if part < found["replicas"] else ""
    count = found["replicas"]
    goal = [
        text.format(limit)
        for text, limit in (
            ("first token within {:g} s", objective.first_token),
            ("{:g} s a token", objective.per_token),
        )
        if limit is not None
    ]
    speed = (
        f"{found['requests_per_second']:.4g} requests/s, {found['output_tokens_per_second']:.5g} tokens/s out, "
        f"{found['prompt_tokens_per_second']:.5g} in ({100 * found['cached_part']:.0f} % from the cache)"
    )
    rows = [
        ("replicas", f"{count}{some}, {found['seconds']:.6g} s"),
        ("requests", _counts(found)),
        ("time to first token", _times(first)),
        ("between tokens", _times(gap)),
        ("whole request", _times(whole)),
        ("speed", speed),
    ]
    if goal and found["goodput_part"] is not None:
        share = 100 * found["goodput_part"]
        rows.append(("goodput", f"{found['goodput']:.4g} requests/s ({share:.1f} %) with {', '.join(goal)}"))
    rows += [
        ("utilisation", f"{100 * found['utilisation']:.1f} %, {found['running']:.3g} requests at once"),
        ("queue", f"{found['queue']:.3g} on the average, {found['longest_queue']} at most"),
    ]
    if found["failures"]:
        rows.append(("failures", f"{found['failures']}; replicas were up {100 * found['available']:.2f} % of the time"))
    if found["preemptions"]:
        rows.append(("preemptions", str(found["preemptions"])))
    return in_columns(rows)


def in_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Formats rows of (title, text) in lines of at most COLUMNS characters."""
    indent = " " * (2 + max(len(what) for what, _ in rows))
    found: list[str] = []
    for what, text in rows:
        found += textwrap.wrap(text, COLUMNS, initial_indent=what.ljust(len(indent)), subsequent_indent=indent)
    return found


def _counts(found: Mapping[str, Any]) -> str:
    ends = [f"{found[how]} {how}" for how in ENDS if found[how] or how == "finished"]
    return f"{found['requests']}: {', '.join(ends)}"


def _times(found: Mapping[str, float | None]) -> str:
    shown = [f"{key} {_seconds(value)}" for key, value in found.items() if value is not None and key != "mean"]
    return ", ".join(shown) or "none"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"
