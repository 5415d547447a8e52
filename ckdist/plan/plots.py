"""Draws a plan: tokens per second over hosts, the roofline of one host with the model's steps, and memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ckdist.figure import check_path, new_figure, save_figure
from ckdist.layouts.rough_cost import PRODUCTS
from ckdist.plan.compare import Answer, over_hosts
from ckdist.plan.predict import Predictor, Question, Way
from ckdist.plan.step_shape import StepShape

MOST_HOSTS = 64
BATCHES = (1, 4, 16, 64, 256)
PARTS = "weights", "cache", "states", "activations", "buffers", "process"


def draw(question: Question, found: Sequence[Answer], path: str) -> None:
    """Writes the figure. Raises ConfigError without matplotlib, for an unknown suffix, or if writing fails."""
    check_path(path)  # fail early: before the predictions
    figure = new_figure(15, 4.5)
    hosts, roofline, memory = figure.subplots(1, 3)
    _hosts(hosts, question, found)
    _roofline(roofline, question)
    _memory(memory, question, found)
    save_figure(figure, path)


def _hosts(axes: Any, question: Question, found: Sequence[Answer]) -> None:
    """Tokens per second of the best way over hosts, with the range of measured speeds over predictions."""
    rows = [(hosts, ways[0]) for hosts, ways in over_hosts(question, MOST_HOSTS, found).items() if ways[0].fits]
    for name in ("decode", "prefill"):
        rates = [getattr(one, name) for _, one in rows]
        counts = [hosts for hosts, _ in rows]
        (line,) = axes.plot(counts, [rate.tokens for rate in rates], "o-", label=name)
        axes.fill_between(
            counts, [rate.low for rate in rates], [rate.high for rate in rates], alpha=0.2, color=line.get_color()
        )
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="tokens/s", title="the best way on more hosts")
    counts = [hosts for hosts, _ in rows]
    axes.set_xticks(counts, [str(hosts) for hosts in counts], minor=False)
    axes.set_xticks([], minor=True)
    if rows:
        axes.legend()


def _roofline(axes: Any, question: Question) -> None:
    """Operations per second over operations per byte: the limits of the host, and steps of several sizes."""
    machine = question.cluster.machine
    one = Predictor(question.on(dataclasses.replace(question.cluster, hosts=1)), Way("tensor"))
    read = machine.nodes * machine.bandwidth
    kinds = {one.weight(w.name) for w in one.stages[0].programs[0].weights if len(w.dims) > 1}
    cost = max(kinds, key=lambda kind: kind.form)
    peak = machine.total_cores * machine.product_rate(cost.kind, cost.form, 256)
    at = [peak / read * 2.0**power for power in range(-10, 5)]
    axes.plot(at, [min(peak, read * x) for x in at], "k-", label=f"{cost.kind or 'products'} at most")
    for rows in BATCHES:
        operations, size = intensity(one, rows)
        seconds = one.seconds(StepShape.decode(rows, question.context))
        axes.plot(operations / size, operations / seconds * machine.nodes, "o", label=f"{rows} row{'s' * (rows > 1)}")
    axes.set(
        xscale="log", yscale="log", xlabel="operations per byte of weights", ylabel="operations/s", title="roofline"
    )
    axes.legend(fontsize="small")


def intensity(predictor: Predictor, rows: int) -> tuple[float, float]:
    """(operations, bytes of weights) of the first rank's products in a step of `rows` rows."""
    operations = size = 0.0
    for cost in (stage.costs[0] for stage in predictor.stages):
        for instr, count in cost.distinct:
            if instr.op in PRODUCTS:
                for part in cost.parts(instr, StepShape.decode(rows, 0)):
                    operations += count * part.operations
                    size += count * part.read
    return operations, size


def _memory(axes: Any, question: Question, found: Sequence[Answer]) -> None:
    """Memory of the largest rank, for each way."""
    names, below = [str(one.way) for one in found], [0.0] * len(found)
    for part in PARTS:
        sizes = [getattr(one.largest, part) / 2**30 for one in found]
        axes.bar(names, sizes, bottom=below, label=part)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.axhline(question.cluster.rank_memory / 2**30, color="k", linestyle="--", label="there is")
    top = max(*below, question.cluster.rank_memory / 2**30)
    axes.set(ylabel="GiB of the largest rank", title="memory", ylim=(0, 1.4 * top))
    axes.tick_params(axis="x", rotation=20)
    axes.legend(fontsize="small", ncols=3, loc="upper center")
