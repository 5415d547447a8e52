"""`ckdist plan --train`: memory of a training on each rank, by mesh, and the time of its step."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from ckdist.config.plan_config import PlanConfig
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.plan.compare import parameters
from ckdist.plan.predict import Question
from ckdist.plan.simulated_training import UNCERTAINTY
from ckdist.plan.training_answer import Setup, TrainingAnswer, training_answers

COLUMNS = 80


def run_training(config: PlanConfig, question: Question) -> int:
    """Prints the plan of a training. Returns 0."""
    setup = Setup(str(config.train), config.batches, config.optim, config.zero_stage, config.weights_dtype)
    found = training_answers(question.checkpoint.spec, question.cluster, config.batch_tokens, setup)
    if config.json:
        print(json.dumps([as_json(one) for one in found], indent=1))
    else:
        print("\n".join(lines(config, question, found)))
    return 0


def lines(config: PlanConfig, question: Question, found: list[TrainingAnswer]) -> Iterator[str]:
    """Yields the report for people."""
    machine, (total, _) = question.cluster.machine, parameters(question.checkpoint)
    trained = "all weights" if config.train == "full" else "adapters of rank 16"
    size = f"{total / 1e9:.2f} B parameters"
    heading = f"training of {trained} of {size}, {config.batch_tokens} tokens a step of each replica"
    heading += f", {config.optim}, zero_stage {config.zero_stage}"
    heading += ", weights in bfloat16" if config.weights_dtype == "bfloat16" else ""
    yield from textwrap.wrap(heading, COLUMNS)
    yield f"times may be wrong by {UNCERTAINTY:.0%} either way"
    if config.batches > 1:
        yield f"in {config.batches} batches, one after the other"
    yield from textwrap.wrap(f"{config.hosts} x {machine.name[:50]} ({machine.source[:30]})", COLUMNS)
    yield ""
    yield f"{'mesh':<24s}{'memory of a rank':<22s}{'step':<12s}{'tokens/s':<12s}bound"
    room = question.cluster.rank_memory / 2**30
    for one in found:
        size = f"{one.total / 2**30:.1f} of {room:.0f} GiB"
        speeds = "does not fit: no speed"
        if one.times:
            speeds = f"{one.times.total:<12.3g}{one.rate:<12.4g}{one.times.bound}"
        yield f"{one.mesh!s:<24s}{size:<22s}{speeds}"
    yield ""
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in found[0].memory.items() if size)
    yield from textwrap.wrap(f"a rank of {found[0].mesh}: {parts}", COLUMNS)
    if not found[0].times:
        hosts = -(-found[0].total * question.cluster.size // int(question.cluster.machine.total_memory))
        yield f"about {hosts} such hosts would hold it; lora, or fewer --batch-tokens, takes less"


def as_json(one: TrainingAnswer) -> dict[str, Any]:
    """Returns all numbers of one mesh."""
    times = one.times._asdict() | {"total": one.times.total} if one.times else None
    return {"mesh": dict(one.mesh.axes), "memory": dict(one.memory), "seconds": times, "tokens_per_second": one.rate}
