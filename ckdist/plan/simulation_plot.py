"""Figures of a simulation: the waits of requests over time, and the parts of a training."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckdist.figure import new_figure, plain_ticks, save_figure
from ckdist.plan.observed import FINISHED, Observed
from ckdist.plan.serving_report import Objective

PERIODS = 60  # of the time axis


def draw(seen: Observed, objective: Objective, path: str) -> None:
    """Writes a figure: the distributions of waits for the first token and between tokens, and the first over time.

    Raises the errors of `ckdist.figure`.
    """
    figure = new_figure(11, 4)
    parts, times = figure.subplots(1, 2)
    rows = seen.table
    finished = rows.how == FINISHED
    waits, arrival = (rows.first - rows.arrival)[finished], rows.arrival[finished]
    if len(waits):
        parts.plot(np.sort(waits), np.arange(1, len(waits) + 1) / len(waits), label="time to first token")
        times.plot(*over_time(arrival, waits, 0.50), label="half of the requests")
        times.plot(*over_time(arrival, waits, 0.95), label="95 %")
    points = [(gap, q) for q in np.linspace(0.002, 0.998, 250) if (gap := seen.gaps.quantile(float(q))) is not None]
    if points:
        parts.plot(*zip(*points, strict=True), label="between tokens")
    if objective.first_token is not None:
        times.axhline(objective.first_token, color="black", linestyle=":", label="objective")
    for axes, across, up in ((parts, "seconds", "fraction within"), (times, "arrival, s", "time to first token, s")):
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    parts.set_xscale("log")
    plain_ticks(parts.xaxis)
    save_figure(figure, path)


def draw_training(found: Mapping[str, Any], room: float, path: str) -> None:
    """Writes a figure of `training_report`: seconds of a step, memory of a host, and the use of weeks.

    `room`: bytes of a host's memory. Raises the errors of `ckdist.figure`.
    """
    figure = new_figure(12, 4)
    axes = figure.subplots(1, 3)
    memory = {name: size / 2**30 for name, size in found["memory"].items()}
    weeks = {name: 100 * part for name, part in found["weeks"].items()}
    titles = "seconds of a step", "GiB of a host", f"% of {found['days']:g} days"
    for one, title, bars in zip(axes, titles, (found["step_parts"], memory, weeks), strict=True):
        one.barh(list(bars), list(bars.values()))
        one.invert_yaxis()
        one.set_xlabel(title)
        one.grid(alpha=0.3, axis="x")
    axes[1].axvline(room / 2**30, color="black", linestyle=":")
    save_figure(figure, path)


def over_time(arrival: np.ndarray, waits: np.ndarray, part: float) -> tuple[list[float], list[float]]:
    """Returns the middle of each of PERIODS periods with arrivals, and the quantile `part` of the waits in it."""
    edges = np.linspace(0.0, float(arrival.max()) + 1e-9, PERIODS + 1)
    period = np.searchsorted(edges, arrival, side="right") - 1
    used = [number for number in range(PERIODS) if (period == number).any()]
    middles = [float(edges[number] + edges[number + 1]) / 2 for number in used]
    return middles, [float(np.quantile(waits[period == number], part)) for number in used]
