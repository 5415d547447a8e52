"""Results of a simulated training in numbers: the parts of a step's time, memory, and the use of weeks."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckdist.errors import ConfigError
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.plan import simulated_training as simulated
from ckdist.plan.serving_report import in_columns

LEAST_MTBF = 60.0  # seconds, of a whole job
MOST_PASSES = 4_000_000


def training_report(
    cost: simulated.TrainingCost,
    spread: float,
    host_mtbf: float,
    restart: float,
    interval: float | None,
    days: float,
    seed: int,
) -> dict[str, Any]:
    """Simulates a training of `days` and returns its results.

    `host_mtbf` is in seconds (inf: no host fails). `interval` is the work between checkpoints in seconds; None: the
    best. Raises ConfigError if the job would fail all the time, or has more passes than can be simulated.
    """
    step, times = _step(cost, spread, seed)
    mtbf = host_mtbf / cost.mesh.hosts
    if mtbf < LEAST_MTBF:
        raise ConfigError(
            f"{cost.mesh.hosts} hosts would fail every {mtbf:.3g} s, and a training needs {LEAST_MTBF:g} s at least: "
            "give a longer --host-mtbf"
        )
    checkpoint = cost.checkpoint()
    chosen = simulated.best_interval(mtbf, checkpoint) if interval is None else interval
    passed = simulated.weeks(
        simulated.Reliability(mtbf, restart, checkpoint, chosen), days * 86400, np.random.default_rng([seed, 1])
    )
    memory = cost.memory()
    operations = (1 + 2) * 2.0 * cost.model.active * cost.tokens  # of weights, forward and backward
    return {
        "hosts": cost.mesh.hosts,
        "tokens_of_step": cost.tokens,
        "step_seconds": step,
        "step_parts": _parts(cost, times),
        "bubble": float(np.mean([one.bubble for one in times])),
        "tokens_per_second": cost.tokens / step,
        "operations_part": operations / (step * cost.mesh.hosts * cost.host.operations),
        "memory": memory,
        "memory_total": sum(memory.values()),
        "fits": sum(memory.values()) <= cost.host.memory,
        "mtbf_seconds": mtbf if math.isfinite(mtbf) else None,
        "checkpoint_seconds": checkpoint,
        "checkpoint_interval": chosen if math.isfinite(chosen) else None,
        "days": days,
        "failures": passed.failures,
        "checkpoints": passed.checkpoints,
        "weeks": {name: getattr(passed, name) / passed.seconds for name in ("useful", "lost", "writing", "down")},
        "goodput": passed.goodput,
        "tokens": cost.tokens / step * passed.useful,
    }


def _step(cost: simulated.TrainingCost, spread: float, seed: int) -> tuple[float, list[simulated.PipelineTimes]]:
    """Returns the seconds of a step and the times of its replicas. Without `spread` one replica stands for all."""
    mesh, batches = cost.mesh, cost.batches.count
    replicas = mesh.dp if spread else 1
    if replicas * mesh.pp * batches > MOST_PASSES:
        raise ConfigError(
            f"{replicas} replicas of {mesh.pp} stages with {batches} batches are more than {MOST_PASSES} passes: "
            "give fewer --batches, or no --spread"
        )
    hop = cost.hop() if mesh.pp > 1 else 0.0
    times = [
        simulated.pipeline(
            mesh.pp, batches, cost.forward(), cost.backward(), hop, spread, np.random.default_rng([seed, 0, i])
        )
        for i in range(replicas)
    ]
    return simulated.step_seconds(cost, times), times


def _parts(cost: simulated.TrainingCost, times: list[simulated.PipelineTimes]) -> dict[str, float]:
    """Returns the parts of a step's seconds, for the slowest replica."""
    slowest, count = max(times, key=lambda one: one.seconds), cost.batches.count
    parts = {
        "tensor-parallel sums": 2 * count * cost.sums(),
        "waiting for stages": slowest.seconds - slowest.busy,
        "gradients": cost.gradients(),
        "optimizer": cost.update(),
    }
    return {"computing": simulated.step_seconds(cost, times) - sum(parts.values()), **parts}


def training_lines(found: Mapping[str, Any], cost: simulated.TrainingCost) -> list[str]:
    """Formats the report as text."""
    mesh, step = cost.mesh, found["step_seconds"]
    parts = ", ".join(f"{n} {v / step:.0%}" for n, v in found["step_parts"].items() if v > 0.005 * step)
    memory = ", ".join(f"{name} {gigabytes(size)}" for name, size in found["memory"].items())
    room = f"{gigabytes(found['memory_total'])} of {gigabytes(cost.host.memory)}"
    rows = [
        ("mesh", f"dp {mesh.dp} x tp {mesh.tp} x pp {mesh.pp}: {found['hosts']} hosts"),
        ("step", f"{step:.4g} s for {found['tokens_of_step']} tokens, {found['tokens_per_second']:.5g} tokens/s"),
        ("", f"times may be wrong by {simulated.UNCERTAINTY:.0%} either way"),
        ("", parts),
        ("bubble", f"{found['bubble']:.1%} of the computing"),
        ("operations", f"{found['operations_part']:.1%} of the rate that the hosts' products reach"),
        ("memory of a host", room if found["fits"] else f"{room}: does not fit"),
        ("", memory),
        ("checkpoint", f"{found['checkpoint_seconds']:.4g} s"),
    ]
    if found["mtbf_seconds"] is not None:
        went = ", ".join(f"{name} {part:.1%}" for name, part in found["weeks"].items())
        rows += [
            ("between failures", f"{found['mtbf_seconds'] / 3600:.3g} h on the average, {found['failures']} failures"),
            ("checkpoints", f"{found['checkpoints']}, one each {found['checkpoint_interval']:.4g} s of work"),
            (f"{found['days']:g} days", went),
        ]
    rows.append(("tokens", f"{found['tokens']:.4g} in {found['days']:g} days (goodput {found['goodput']:.1%})"))
    return in_columns(rows)
