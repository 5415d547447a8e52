"""`ckdist plan`: whether a model fits a cluster, its speed in every layout, the limits, and the improvements.

`ckdist.plan.compare` computes the answers. This module formats them as lines for people or as one JSON object.
"""

import dataclasses
import difflib
import json
import pathlib
import textwrap
from collections.abc import Iterator
from typing import Any

from ckdist.config.plan_config import PlanConfig
from ckdist.errors import ConfigError
from ckdist.figure import check_path
from ckdist.hub.catalogue import CATALOGUE as PUBLISHED
from ckdist.hub.model_url import is_url
from ckdist.hub.resolve import find
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.layouts.rank_plan import DEFAULT_CONTEXT
from ckdist.plan.cluster import Cluster
from ckdist.plan.compare import (
    Answer,
    Question,
    answers,
    changes,
    context_that_fits,
    hosts_that_fit,
    over_hosts,
    parameters,
    serial_share,
)
from ckdist.plan.machine_spec import MachineSpec, machine_named
from ckdist.plan.rank_memory import RankMemory
from ckdist.plan.this_machine import this_machine_spec
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.described import describe, shape_names, shape_path

COLUMNS = 80
MOST_HOSTS = 16  # in the table over hosts, unless --hosts is larger
BOUNDS = {
    "bandwidth": "memory",
    "arithmetic": "arithmetic",
    "exchange": "other ranks",
    "link": "other hosts",
    "latency": "latency",
}


def run(config: PlanConfig) -> int:
    """Prints the plan. Returns 0."""
    if config.plot is not None:
        check_path(config.plot)  # fails before the computation
    checkpoint = open_model(config)
    questions = [question_of(config, checkpoint, open_machine(name)) for name in config.machine]
    question = questions[0]
    if config.train:
        from ckdist.cli.plan_training import run_training

        return run_training(config, question)
    if len(questions) > 1:
        compared = [(question, answers(question)) for question in questions]
        if config.json:
            print(json.dumps([as_json(*one) for one in compared], indent=1))
        else:
            print("\n".join(machine_lines(compared)))
        return 0
    found = answers(question)
    if config.json:
        print(json.dumps(as_json(question, found), indent=1))
    else:
        print("\n".join(lines(question, found)))
    if config.plot:
        from ckdist.plan.plots import draw

        draw(question, found, config.plot)
    return 0


def open_machine(name: str) -> MachineSpec:
    """Returns the machine that --machine names."""
    return this_machine_spec() if name == "this" else machine_named(name)


def open_model(config: PlanConfig) -> Checkpoint:
    """Opens the model that -m names: a file with weights, a config.json, a known shape, or a fetched model.

    Raises:
        ConfigError: There is no such model.
        ModelFileError: The file is invalid.
    """
    name = str(config.model)
    path = pathlib.Path(name)
    described = shape_path(name)
    if path.is_file() and path.suffix == ".json":
        described = path
    elif path.is_dir() and not any(path.glob("*.safetensors")) and (path / "config.json").is_file():
        described = path / "config.json"
    if described is not None:
        return describe(described, config.type)
    if not path.exists() and not (name.startswith("hf:") or is_url(name)) and name not in PUBLISHED:
        close = difflib.get_close_matches(name, shape_names(), n=1, cutoff=0.3)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"{name[:200]} is not a file, a folder or a known model{guess}; "
            f"shapes without weights are {', '.join(shape_names())}"
        )
    if config.type:
        raise ConfigError(
            f"--type {config.type} is for models without weights, and {name[:200]} has some: leave it out"
        )
    return open_checkpoint(find(name))


def question_of(config: PlanConfig, checkpoint: Checkpoint, machine: MachineSpec) -> Question:
    """Returns the question that the flags ask.

    Raises:
        ConfigError: The context is longer than the model's, or the threads are more than a node's cores.
    """
    spec = checkpoint.spec
    context = config.context or min(DEFAULT_CONTEXT, spec.max_position)
    if context > spec.max_position:
        raise ConfigError(f"--context {context} is more than the {spec.max_position} positions of the model: give less")
    if config.threads > machine.cores:
        raise ConfigError(
            f"--threads {config.threads} is more than the {machine.cores} cores of a node of {machine.name}: use fewer"
        )
    return Question(
        checkpoint, Cluster(machine, config.hosts, config.threads), context, config.sequences,
        min(config.n_prompt, context), config.ubatch_size, config.quantize, (config.cache_type_k, config.cache_type_v),
        config.n_gen, config.objective,
    )  # fmt: skip


def lines(question: Question, found: list[Answer]) -> Iterator[str]:
    """Yields the report for people, in lines of at most 80 columns."""
    best = found[0]
    for line in heading(question, best):
        yield from textwrap.wrap(line, COLUMNS)
    yield ""
    room = f"GiB of {question.cluster.rank_memory / 2**30:.0f}"  # memory of a rank
    yield f"{'way':<19s}{room:<11s}{'decode tok/s':<19s}{'bound':<12s}prefill tok/s"
    for one in found:
        size = f"{one.largest.total / 2**30:.1f}"
        if one.decode and one.prefill:
            speeds = f"{rate(one.decode):<19s}{BOUNDS[one.decode.bound]:<12s}{rate(one.prefill)}"
        else:
            speeds = "does not fit: no speed"
        yield f"{one.way!s:<19s}{size:<11s}{speeds}"
    yield ""
    if not best.fits:
        yield from remedies(question)
        return
    yield from verdict(question, found)
    yield from memory_lines(best.largest)
    yield ""
    yield f"{'twice the':<20s}{'decode':<10s}{'prefill':<10s}best way"
    for change in changes(question, best):
        yield f"{change.name:<20s}{times(change.decode):<10s}{times(change.prefill):<10s}{change.way}"
    yield ""
    yield from hosts_lines(question)
    yield from money_lines(question, best)


def heading(question: Question, best: Answer) -> Iterator[str]:
    """Yields the model, the machines and the workload."""
    checkpoint, cluster = question.checkpoint, question.cluster
    machine, (total, used) = cluster.machine, parameters(checkpoint)
    replicas = max(1, best.way.replicas)
    weights = sum(memory.weights for memory in best.memory) * cluster.size // (replicas * len(best.memory))
    name = checkpoint.path.stem if checkpoint.path.stem != "config" else checkpoint.path.parent.name or "config.json"
    mixture = f", {count(used)} of them for a token" if used < 0.9 * total else ""
    yield f"{name[:40]}: {count(total)} parameters{mixture}, about {gigabytes(weights)} of weights"
    nodes = f"{machine.nodes} nodes of {machine.cores} cores" if machine.nodes > 1 else f"{machine.cores} cores"
    yield (
        f"{cluster.hosts} x {machine.name[:50]} ({machine.source[:30]}): {nodes}, "
        f"{machine.bandwidth / 1e9:.0f} GB/s a node"
    )
    yield (
        f"{question.sequences} sequence{'s' * (question.sequences > 1)} of {question.context} tokens, prompts of "
        f"{question.prompt}; times may be wrong by {machine.uncertainty:.0%} either way"
    )


def verdict(question: Question, found: list[Answer]) -> Iterator[str]:
    """Yields the best layout and the next best."""
    best, *others = [one for one in found if one.fits]
    assert best.decode and best.prefill
    parts = best.decode.times
    shares = ", ".join(
        f"{BOUNDS[n]} {v / parts.total:.0%}" for n, v in parts._asdict().items() if v > 0.005 * parts.total
    )
    step = f"best: {best.way}; a step of decode takes {best.decode.seconds * 1e3:.1f} ms: {shares}"
    yield from textwrap.wrap(step, COLUMNS)
    if others:
        slower = others[0].seconds(question) / best.seconds(question) - 1
        yield f"next best: {others[0].way}, {slower:.0%} longer for a prompt and its answer"


def memory_lines(memory: RankMemory) -> Iterator[str]:
    """Yields the memory of the largest rank by use."""
    experts = f" (experts {gigabytes(memory.experts)})" if memory.experts else ""
    parts = {"cache": memory.cache, "states": memory.states, "activations": memory.activations}
    parts |= {"buffers": memory.buffers, "process": memory.process}
    shown = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
    yield from textwrap.wrap(f"largest rank: weights {gigabytes(memory.weights)}{experts}, {shown}", COLUMNS)


def remedies(question: Question) -> Iterator[str]:
    """Yields changes with which the model would fit."""
    if hosts := hosts_that_fit(question):
        yield f"{hosts} such hosts would hold it"
    if context := context_that_fits(question):
        yield f"--context {context} would fit as it is"
    yield "or take matrices of fewer bits (--type, --quantize), or a machine with more memory"


def hosts_lines(question: Question) -> Iterator[str]:
    """Yields decode by number of hosts and layout. "*" marks the best layout by the objective."""
    rows = over_hosts(question, max(MOST_HOSTS, question.cluster.hosts))
    names = list(dict.fromkeys(one.way.name for _, ways in rows for one in ways))
    yield f"{'hosts':<8s}" + "".join(f"{name:<12s}" for name in names) + "decode tok/s"
    previous, told, fitting = 0.0, False, []
    for hosts, ways in rows:
        best, shown = ways[0], {one.way.name: number(one.decode.tokens) for one in ways if one.decode}
        if best.decode is None:
            yield f"{hosts:<8d}does not fit"
            continue
        shown[best.way.name] += "*"
        note = "slower than with fewer" if best.decode.tokens < previous and not told else ""
        told, previous = told or bool(note), max(previous, best.decode.tokens)
        yield (f"{hosts:<8d}" + "".join(f"{shown.get(name, '-'):<12s}" for name in names) + note).rstrip()
        fitting.append((hosts, best.decode.tokens))
    if len(fitting) > 1 and fitting[0][0] == 1:
        hosts, tokens = fitting[1]
        serial = serial_share(tokens / fitting[0][1], hosts)
        yield f"a share of {min(1.0, max(0.0, serial)):.0%} of a decoded token is not shared by {hosts} hosts (Amdahl)"


def machine_lines(compared: list[tuple[Question, list[Answer]]]) -> Iterator[str]:
    """Yields one row per machine with its best layout, the best machine by the objective first."""
    first = compared[0][0]
    each = f"{first.sequences} x {first.prompt} + {first.generated}"
    yield f"{'machine':<23s}{'best way':<20s}{'decode':<9s}{'prefill':<9s}{'seconds':<10s}range"
    yield f"{f'hosts: {first.cluster.hosts}':<43s}{'tok/s':<9s}{'tok/s':<9s}{each}"
    for question, found in sorted(compared, key=lambda one: one[1][0].seconds(one[0])):
        best, machine = found[0], question.cluster.machine
        name = f"{machine.name[:22]:<23s}"
        if not (best.decode and best.prefill):
            yield f"{name}does not fit"
            continue
        speeds = f"{number(best.decode.tokens):<9s}{number(best.prefill.tokens):<9s}"
        total = dataclasses.replace(question, objective="total")
        yield f"{name}{best.way!s:<20s}{speeds}{number(best.seconds(total)):<10s}+-{machine.uncertainty:.0%}"
        yield from (f"  {line}" for line in money_lines(question, best))


def money_lines(question: Question, best: Answer) -> Iterator[str]:
    """Yields power and price, if the machine has them."""
    machine, hosts = question.cluster.machine, question.cluster.hosts
    assert best.decode
    each = 1e6 / best.decode.tokens / 3600  # hours per million tokens
    if machine.watts:
        watts = machine.watts * hosts
        day, million = watts * 24e-3, watts * each * 1e-3
        yield f"{watts:.0f} W: {day:.1f} kWh a day, {million:.2f} kWh for a million decoded tokens"
    if machine.price_per_hour:
        price = machine.price_per_hour * hosts
        yield f"{price:.2f} an hour: {price * each:.2f} for a million decoded tokens"


def rate(one: Any) -> str:
    """Formats tokens/s with their lower and upper bounds."""
    return f"{number(one.tokens)} ({number(one.low)}-{number(one.high)})"


def number(value: float) -> str:
    """Formats a value with three digits."""
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def times(value: float) -> str:
    """Formats a factor."""
    return f"{value:.2f} x" if value else "-"


def count(elements: float) -> str:
    """Formats a count in millions, billions or trillions."""
    for unit, size in (("T", 1e12), ("B", 1e9)):
        if elements >= 0.9995 * size:
            return f"{elements / size:.3g} {unit}"
    return f"{elements / 1e6:.0f} M"


def as_json(question: Question, found: list[Answer]) -> dict[str, Any]:
    """Returns all numbers of the plan."""
    total, used = parameters(question.checkpoint)
    asked = {
        name: getattr(question, name)
        for name in ("context", "sequences", "prompt", "generated", "objective", "ubatch_size", "cache")
    }

    def speed(one: Any) -> dict[str, Any] | None:
        """Returns the numbers of one rate."""
        if one is None:
            return None
        numbers = {"tokens_per_second": one.tokens, "low": one.low, "high": one.high, "seconds": one.seconds}
        return numbers | {"bound": one.bound, "parts": one.times._asdict()}

    ways = [
        {
            **dataclasses.asdict(one.way),
            "fits": one.fits,
            "memory": [dataclasses.asdict(memory) | {"total": memory.total} for memory in one.memory],
            "decode": speed(one.decode),
            "prefill": speed(one.prefill),
        }
        for one in found
    ]
    more = [dataclasses.asdict(change) for change in changes(question, found[0])] if found[0].fits else []
    return {
        "model": str(question.checkpoint.path),
        "parameters": total,
        "parameters_used": used,
        "hosts": question.cluster.hosts,
        "machine": dataclasses.asdict(question.cluster.machine),
        "question": asked,
        "ways": ways,
        "twice": more,
        "hosts_that_fit": None if found[0].fits else hosts_that_fit(question),
    }
