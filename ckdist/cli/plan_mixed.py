"""`ckdist plan --machine a.toml:2,b.toml:1`: one job over hosts that differ."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from ckdist.cli.plan import heading, number, open_machine, question_of, speed_columns
from ckdist.config.plan_config import PlanConfig
from ckdist.errors import ConfigError
from ckdist.plan.common_level import at_level, common_level
from ckdist.plan.compare import Answer, answers
from ckdist.plan.mixed_hosts import Kind, MixedAnswer, kinds_of, mixed_answers, staged_answers
from ckdist.plan.predict import Question
from ckdist.weights.checkpoint import Checkpoint


def run_mixed(config: PlanConfig, checkpoint: Checkpoint) -> int:
    """Prints the plan. Returns 0."""
    if config.hosts > 1:
        raise ConfigError(f"--hosts {config.hosts}: --machine {config.machine[0][:100]} counts the hosts: leave it out")
    kinds = [Kind(open_machine(name), hosts) for name, hosts in kinds_of(config.machine[0])]
    questions = [question_of(config, checkpoint, kind.machine) for kind in kinds]
    level = common_level(kind.machine.isa for kind in kinds)
    together = [replace(kind, machine=at_level(kind.machine, level)) for kind in kinds]
    found = mixed_answers(questions[0], together) + staged_answers(questions[0], together)
    clusters = [replace(each.cluster, hosts=kind.hosts) for each, kind in zip(questions, kinds, strict=True)]
    questions = [each.on(cluster) for each, cluster in zip(questions, clusters, strict=True)]
    alone = [answers(each)[0] for each in questions]
    if config.json:
        print(as_json(kinds, found, level))
    else:
        print("\n".join([*_lines(questions[0], kinds, found, alone), *level_lines(kinds, level)]))
    return 0


def level_lines(kinds: Sequence[Kind], level: str) -> Iterator[str]:
    """The level of instructions of the job, if a machine has a better one, and the speed that it costs."""
    for kind in kinds:
        if kind.machine.isa != level:
            own, lower = (
                machine.product_rate("Q8_0", 2, 256) for machine in (kind.machine, at_level(kind.machine, level))
            )
            yield (
                f"all hosts compute at {level}, the best level of each; {kind.machine.name} has {kind.machine.isa}, "
                f"and reaches {lower / own:.0%} of its rate in products of 8-bit numbers (by instructions)"
            )


def as_json(kinds: Sequence[Kind], found: Sequence[MixedAnswer], level: str) -> str:
    """The answers as one JSON object."""
    hosts = [{"machine": kind.machine.name, "hosts": kind.hosts} for kind in kinds]
    return json.dumps({"hosts": hosts, "level": level, "answers": [asdict(one) for one in found]}, indent=1)


def _lines(
    question: Question, kinds: Sequence[Kind], found: Sequence[MixedAnswer], alone: Sequence[Answer]
) -> Iterator[str]:
    yield next(heading(question, alone[0]))
    yield ""
    yield f"{'hosts and parts of a rank':<44s}{'memory':<9s}{'decode tok/s':<14s}prefill tok/s"
    for one in found:
        name = "equal parts" if len(set(one.shares)) == 1 else f"--tensor-split auto: {':'.join(map(str, one.shares))}"
        if one.stages > 1:
            name = f"-pp {one.stages} -ts {','.join(map(str, one.shares))}"
        speeds = f"{number(one.decode):<14s}{number(one.prefill)}" if one.decode else "does not fit"
        yield f"{f'all, {name}':<44s}{f'{one.fullest:.0%}':<9s}{speeds}"
    for kind, one in zip(kinds, alone, strict=True):
        name, room = f"only {kind.hosts} x {kind.machine.name}, {one.way}", kind.machine.total_memory
        used = f"{one.largest.total * kind.machine.nodes / room:.0%}"
        yield f"{name[:43]:<44s}{used:<9s}{speed_columns(one)}"
