"""`ckdist plan`: whether a model fits a cluster, its speed in every layout, the limits, and the improvements.

`ckdist.plan.compare` computes the answers. This module formats them as lines for people or as one JSON object.
"""

import dataclasses
import json
import pathlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

from ckdist.cli.frozen_import import without_collections
from ckdist.config.engine_config import EngineConfig
from ckdist.config.plan_config import PlanConfig
from ckdist.errors import ConfigError, did_you_mean
from ckdist.figure import check_path
from ckdist.hub.catalogue import CATALOGUE as PUBLISHED
from ckdist.hub.model_url import is_url
from ckdist.hub.resolve import find
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.layouts.rank_plan import DEFAULT_CONTEXT
from ckdist.plan import compare
from ckdist.plan.cluster import Cluster
from ckdist.plan.machine_spec import MachineSpec, machine_named
from ckdist.plan.predict import Predictor, Question
from ckdist.plan.rank_memory import RankMemory
from ckdist.plan.this_machine import this_machine_spec
from ckdist.terminal import console, is_terminal
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.described import describe, near_shape, shape_names, shape_path

COLUMNS = 80
SILENT_SECONDS = 1.0  # without progress
MOST_HOSTS = 16  # in the table over hosts, unless --hosts is larger
BOUNDS = {
    "bandwidth": "memory",
    "arithmetic": "arithmetic",
    "exchange": "other ranks",
    "link": "other hosts",
    "latency": "latency",
}


@without_collections()
def run(config: PlanConfig) -> int:
    """Prints the plan. Returns 0."""
    if config.plot is not None:
        check_path(config.plot)  # fails before the computation
    checkpoint = open_model(config)
    if config.mixes_machines:
        from ckdist.cli.plan_mixed import run_mixed

        return run_mixed(config, checkpoint)
    machines = [with_price(open_machine(name), config.price) for name in config.machine]
    progress = PlanProgress()
    questions = [question_of(config, checkpoint, machine, progress.finished) for machine in machines]
    question = questions[0]
    if config.train:
        from ckdist.cli.plan_training import run_training

        return run_training(config, question)
    draft = draft_of(config, checkpoint)
    with progress:
        if len(questions) > 1:
            compared = [(each, compare.answers(each)) for each in questions]
            numbers: Any = [as_json(*each) for each in compared] if config.json else None
            report = machine_lines(compared)
        else:
            found = compare.answers(question)
            drafts = with_drafts(config, question, found, draft) if config.spec != "off" else {}
            numbers = as_json(question, found, drafts) if config.json else None
            report = [*lines(question, found, not config.sequences), *draft_lines(config, drafts)]
        text = json.dumps(numbers, indent=1) if config.json else "\n".join(report)
    print(text)
    if config.plot:
        from ckdist.plan.plots import draw

        draw(question, compare.answers(question), config.plot)
    return 0


class PlanProgress:
    """Names finished layouts on standard error, from the second second on. A context manager."""

    def __init__(self) -> None:
        self._shown_from = time.monotonic() + SILENT_SECONDS
        self._status = console(sys.stderr).status("plan") if is_terminal(sys.stderr) else None
        self._started = False

    def finished(self, layout: str) -> None:
        """Shows a layout: in place on a terminal, else as a line."""
        if time.monotonic() < self._shown_from:
            return
        if self._status is None:
            print(f"plan: {layout}", file=sys.stderr, flush=True)
            return
        self._status.update(f"plan: {layout}")
        if not self._started:
            self._started = True
            self._status.start()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        if self._started and self._status is not None:
            self._status.stop()


def with_price(machine: MachineSpec, price: float) -> MachineSpec:
    """Returns the machine with the price of --price, if that is given."""
    return dataclasses.replace(machine, price_per_hour=price, price_source="--price") if price else machine


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
    near = None if described or path.exists() or name in PUBLISHED else near_shape(name)
    if near is not None:
        print(f"{name[:100]} is planned as {near}", file=sys.stderr)
        described = shape_path(near)
    if path.is_file() and path.suffix == ".json":
        described = path
    elif path.is_dir() and not any(path.glob("*.safetensors")) and (path / "config.json").is_file():
        described = path / "config.json"
    if described is not None:
        return describe(described, config.type)
    if not path.exists() and not (name.startswith("hf:") or is_url(name)) and name not in PUBLISHED:
        raise ConfigError(
            f"{name[:200]} is not a file, a folder or a known model{did_you_mean(name, shape_names(), 0.3)}; "
            f"shapes without weights are {', '.join(shape_names())}"
        )
    if config.type:
        raise ConfigError(
            f"--type {config.type} is for models without weights, and {name[:200]} has some: leave it out"
        )
    return open_checkpoint(find(name))


def question_of(
    config: PlanConfig, checkpoint: Checkpoint, machine: MachineSpec, report: Callable[[str], object] = len
) -> Question:
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
        checkpoint, Cluster(machine, config.hosts, config.threads), context, config.sequences or 1,
        min(config.n_prompt, context), config.ubatch_size or min(spec.usual_ubatch, EngineConfig.batch_size),
        config.quantize, (config.cache_type_k, config.cache_type_v), config.n_gen, config.objective, report,
    )  # fmt: skip


def draft_of(config: PlanConfig, checkpoint: Checkpoint) -> Checkpoint | None:
    """The model or layer that drafts. None: drafts take no time. Raises ConfigError if there is none."""
    if config.spec not in ("model", "mtp"):
        return None
    if config.spec == "mtp":
        from ckdist.plan.draft_speed import layer_of

        return layer_of(checkpoint)
    return open_model(dataclasses.replace(config, model=config.model_draft, type=None))


def with_drafts(
    config: PlanConfig, question: Question, found: list[compare.Answer], draft: Checkpoint | None
) -> dict[str, dict[str, float]]:
    """Layout -> drafted tokens of each sequence in a step, tokens per second, and their ratio to those without."""
    from ckdist.plan.draft_speed import drafted

    drafts = {}
    for one in found:
        if one.decode is not None:
            asked = config.acceptance, config.draft_max, question.sequences, question.context
            count, speed = drafted(Predictor(question, one.way), draft, *asked)
            gain = speed.tokens / one.decode.tokens
            drafts[str(one.way)] = {"drafted": count, "tokens_per_second": speed.tokens, "gain": gain}
    return drafts


def draft_lines(config: PlanConfig, drafts: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yields decode with drafts by layout."""
    if drafts:
        right = f"drafts, {config.acceptance:.0%} are right"
        yield f"{right:<35s}{'of a step':<12s}{'decode tok/s':<14s}gain"
    for way, one in drafts.items():
        speed = number(one["tokens_per_second"])
        yield f"--spec {config.spec:<7s}{way:<21s}{one['drafted']:<12.0f}{speed:<14s}{times(one['gain'])}"


def lines(question: Question, found: list[compare.Answer], users: bool) -> Iterator[str]:
    """Yields the report for people, in lines of at most 80 columns. `users`: with a table over numbers of users."""
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
    if users:
        yield from users_lines(question, best)
        yield ""
    rows = compare.over_hosts(question, max(MOST_HOSTS, question.cluster.hosts), found)
    yield f"{'twice the':<20s}{'decode':<10s}{'prefill':<10s}best way"
    for change in compare.changes(question, best, rows):
        yield f"{change.name:<20s}{times(change.decode):<10s}{times(change.prefill):<10s}{change.way}"
    yield ""
    yield from hosts_lines(rows)
    yield from money_lines(question, found)


def heading(question: Question, best: compare.Answer) -> Iterator[str]:
    """Yields the model, the machines and the workload."""
    checkpoint, cluster = question.checkpoint, question.cluster
    machine, (total, used) = cluster.machine, compare.parameters(checkpoint)
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
        f"{question.prompt}"
    )
    decode, prefill = machine.seen("decode"), machine.seen("prefill")
    yield (
        f"checked runs reached {decode[0]:g} to {decode[1]:g} of predicted decode, {prefill[0]:g} to {prefill[1]:g} of "
        "predicted prefill"
    )


def verdict(question: Question, found: list[compare.Answer]) -> Iterator[str]:
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
    if hosts := compare.hosts_that_fit(question):
        yield f"{hosts} such hosts would hold it"
    if context := compare.context_that_fits(question):
        yield f"--context {context} would fit as it is"
    if question.checkpoint.format == "config":
        yield from type_lines(question)
    else:
        yield "or take matrices of fewer bits (--quantize), or a machine with more memory"


def users_lines(question: Question, best: compare.Answer) -> Iterator[str]:
    """Yields decode of the best layout by number of users at once."""
    price = question.cluster.machine.price_per_hour * question.cluster.hosts
    yield f"{'users':<8s}{'decode tok/s':<16s}{'of each user':<16s}{'cost of 1M' if price else ''}".rstrip()
    for users, rate in compare.over_users(question, best.way):
        cost = number(price / rate.tokens / 3600 * 1e6) if price else ""
        yield f"{users:<8d}{number(rate.tokens):<16s}{number(rate.tokens / users):<16s}{cost}".rstrip()


def type_lines(question: Question) -> Iterator[str]:
    """Yields a table of smaller types for a model without weights."""
    yield f"{'--type':<11s}{'way':<19s}{'GiB a rank':<12s}{'decode tok/s':<14s}prefill tok/s"
    for kind, best in compare.over_types(question):
        yield f"{kind:<11s}{best.way!s:<19s}{best.largest.total / 2**30:<12.1f}{speed_columns(best)}"


def speed_columns(answer: compare.Answer) -> str:
    """Formats the speeds of decode and prefill for a table's last columns."""
    if answer.decode is None or answer.prefill is None:
        return "does not fit"
    return f"{number(answer.decode.tokens):<14s}{number(answer.prefill.tokens)}"


def hosts_lines(rows: dict[int, list[compare.Answer]]) -> Iterator[str]:
    """Yields decode by number of hosts and layout. "*" marks the best layout by the objective."""
    names = list(dict.fromkeys(one.way.name for ways in rows.values() for one in ways))
    yield f"{'hosts':<8s}" + "".join(f"{name:<12s}" for name in names) + "decode tok/s"
    previous, told, fitting = 0.0, False, []
    for hosts, ways in rows.items():
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
        serial = compare.serial_share(tokens / fitting[0][1], hosts)
        yield f"a share of {min(1.0, max(0.0, serial)):.0%} of a decoded token is not shared by {hosts} hosts (Amdahl)"


def machine_lines(compared: list[tuple[Question, list[compare.Answer]]]) -> Iterator[str]:
    """Yields one row per machine with its best layout, the best machine by the objective first."""
    first = compared[0][0]
    asked = f"hosts: {first.cluster.hosts}, {first.sequences} x {first.prompt} + {first.generated} tokens"
    yield f"{'machine':<23s}{'best way':<20s}{'decode':<9s}{'prefill':<9s}{'seconds':<10s}cost"
    yield f"{asked[:42]:<43s}{'tok/s':<9s}{'tok/s':<19s}of 1M"
    for question, found in sorted(compared, key=lambda one: one[1][0].seconds(one[0])):
        best, machine = found[0], question.cluster.machine
        name = f"{machine.name[:22]:<23s}"
        if not (best.decode and best.prefill):
            yield f"{name}does not fit"
            continue
        speeds = f"{number(best.decode.tokens):<9s}{number(best.prefill.tokens):<9s}"
        total = dataclasses.replace(question, objective="total")
        price = machine.price_per_hour * question.cluster.hosts
        cost = number(price / best.decode.tokens / 3600 * 1e6) if price else "-"
        yield f"{name}{best.way!s:<20s}{speeds}{number(best.seconds(total)):<10s}{cost}"
        yield from (f"  {line}" for line in money_lines(question, found[:1]))


def money_lines(question: Question, found: list[compare.Answer]) -> Iterator[str]:
    """Yields the power of the best layout, and the price of tokens by layout, if the machine has them."""
    machine, hosts, best = question.cluster.machine, question.cluster.hosts, found[0]
    assert best.decode
    if machine.watts:
        watts = machine.watts * hosts
        million = watts * 1e3 / best.decode.tokens / 3600
        yield f"{watts:.0f} W ({machine.watts_of}): {watts * 24e-3:.1f} kWh a day, {million:.2f} kWh for 1M decoded"
    price = machine.price_per_hour * hosts
    if not price:
        yield "no price known: give --price, of a host per hour"
        return
    yield from textwrap.wrap(f"{price:.2f} an hour ({machine.price_source or 'the file of the machine'})", COLUMNS - 2)
    yield f"{'cost of 1M tokens':<21s}{'of a prompt':<14s}{'generated':<14s}generated tokens for 1.00"
    for one in found:
        if one.decode and one.prefill:
            prompt, generated = (price / each.tokens / 3600 * 1e6 for each in (one.prefill, one.decode))
            yield f"{one.way!s:<21s}{number(prompt):<14s}{number(generated):<14s}{number(1e6 / generated)}"


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


def as_json(
    question: Question, found: list[compare.Answer], drafts: dict[str, dict[str, float]] | None = None
) -> dict[str, Any]:
    """Returns all numbers of the plan."""
    total, used = compare.parameters(question.checkpoint)
    asked = {
        name: getattr(question, name)
        for name in ("context", "sequences", "prompt", "generated", "objective", "ubatch_size", "cache")
    }

    def speed(one: Any) -> dict[str, Any] | None:
        """Returns the numbers of one rate."""
        if one is None:
            return None
        numbers = {"tokens_per_second": one.tokens, "low": one.low, "high": one.high, "seconds": one.seconds}
        price = question.cluster.machine.price_per_hour * question.cluster.hosts
        if price:
            numbers["cost_of_a_million"] = price / one.tokens / 3600 * 1e6
        return numbers | {"bound": one.bound, "parts": one.times._asdict()}

    ways = [
        {
            **dataclasses.asdict(one.way),
            "fits": one.fits,
            "memory": [dataclasses.asdict(memory) | {"total": memory.total} for memory in one.memory],
            "decode": speed(one.decode),
            "prefill": speed(one.prefill),
            "drafts": (drafts or {}).get(str(one.way)),
        }
        for one in found
    ]
    more = [dataclasses.asdict(change) for change in compare.changes(question, found[0])] if found[0].fits else []
    return {
        "model": str(question.checkpoint.path),
        "parameters": total,
        "parameters_used": used,
        "hosts": question.cluster.hosts,
        "machine": dataclasses.asdict(question.cluster.machine),
        "question": asked,
        "ways": ways,
        "twice": more,
        "users": {users: speed(one) for users, one in compare.over_users(question, found[0].way)}
        if found[0].fits
        else {},
        "hosts_that_fit": None if found[0].fits else compare.hosts_that_fit(question),
    }
