"""Turns a model path into a running executable on every rank: trace, lower, plan, load, bind.

Every function here is called by all ranks of a world together.
"""

import contextlib
import functools
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckdist import native
from ckdist.comm.host_name import machine_name
from ckdist.comm.thresholds import load_thresholds
from ckdist.comm.transports.link import Link
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.dry_breakers import DryBreakers
from ckdist.engine.engine import Engine
from ckdist.engine.expert_load import dispatch_stats, expert_stats
from ckdist.engine.grammars import Grammars
from ckdist.engine.prefill_measurement import choose_prefill, prefill_stats
from ckdist.engine.rank_stage import (
    layers_of_stages,
    open_communicators,
    tell_stages,
    trace_stage,
    with_chosen_layout,
)
from ckdist.engine.sampler import Sampler
from ckdist.engine.shard import Shard, plan_and_open
from ckdist.engine.stage_ranks import stage_rank
from ckdist.engine.trace import Labels, Trace
from ckdist.errors import ConfigError
from ckdist.layouts.expert_placement import dispatch_from
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.layouts.prefill_choice import PrefillChoice
from ckdist.layouts.rank_plan import Plan
from ckdist.models.blocks.moe import is_expert
from ckdist.models.spec import ModelSpec
from ckdist.native import CData
from ckdist.overrides import metadata_overrides
from ckdist.program.executable import Executable
from ckdist.program.native_worker import NativeWorker
from ckdist.program.tracer import Tracer
from ckdist.tokens.confined import load_tried
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.topology import default_threads, huge_pages, is_bound, sample_pages, this_machine
from ckdist.topology.tree import format_cpu_list
from ckdist.weights.adapter import Adapter
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.copies import compare_samples
from ckdist.weights.host_shards import HostShards
from ckdist.weights.loader import ShardLoader
from ckdist.weights.model_files import ModelFile, model_files
from ckdist.weights.packed_type import packed_type, weight_cost
from ckdist.weights.whole_comparison import MAX_READERS, WholeComparison
from ckdist.worker.rank_models import Colocation

log = logging.getLogger(__name__)

BUNDLED = pathlib.Path(__file__).parent.parent / "models" / "bundled"


@dataclass
class Model:
    """One rank of a loaded model.

    `loader` and `adapter` own this rank's weights. `shards` finds weights of other ranks on the host. All must outlive
    `executable`.
    """

    world: World
    checkpoint: Checkpoint
    spec: ModelSpec
    plan: Plan
    loader: ShardLoader
    shards: HostShards | None
    adapter: Adapter | None
    executable: Executable
    prefill: PrefillChoice
    weight_bytes: int  # of this rank
    total_weight_bytes: int  # of all ranks
    trace: Trace | None

    def placement_map(self) -> str:
        """A table with one line per rank, then one line per setting that could be better. A collective call.

        Columns: host, nodes, CPUs, weights, cache, resident memory, pages, huge pages. "Pages" counts a sample of the
        pages of weights and cache: on the rank's nodes, and elsewhere, according to the kernel. "Huge pages" is their
        share in both.
        """
        p = self.plan.placement
        import psutil

        cpus = format_cpu_list(p.cpus) or "any"
        pages = sample_pages(self.loader.arena, self.loader.planned_bytes, p.nodes) + sample_pages(
            self.executable.kv, self.executable.kv_bytes, p.nodes, touch=True
        )
        blocks = [(self.loader.arena, self.loader.planned_bytes), (self.executable.kv, self.executable.kv_bytes)]
        huge = huge_pages(blocks)
        host = machine_name(self.world.hosts[self.world.rank])
        sizes = [self.weight_bytes, self.executable.kv_bytes, psutil.Process().memory_info().rss]
        row = [
            host,
            format_cpu_list(p.nodes),
            cpus,
            sizes,
            f"{pages!s:<22s} {huge}",
            p.note,
            pages.refused,
            is_bound(self.executable.kv),
            self.loader.filled.fraction,
        ]
        lines = [
            (
                "rank  host              node  cpus            weights    kv cache   resident   "
                "pages here / elsewhere  huge pages"
            )
        ]
        rows = self.world.gather(row)
        for rank, (host, node, cpus, sizes, pages, *_) in enumerate(rows):
            lines.append(
                f"{rank:<5d} {host:<17s} {node:<5s} {cpus:<15s} "
                + " ".join(f"{gigabytes(size):<10s}" for size in sizes)
                + f" {pages}"
            )
        notes = {f"{host}: {note}" for host, *_, note, _, _, _ in rows if note}
        notes |= {f"{host}: where pages lie is unknown ({refused})" for host, *_, refused, _, _ in rows if refused}
        notes |= {
            f"{host}: the kernel refuses to bind memory to nodes here, so pages lie where their rank first touched them"
            for host, *_, bound, _ in rows
            if not bound
        }
        if (packed := min(row[-1] for row in rows)) < 1:
            lines.append(f"{100 * packed:.0f} % of the weights are packed so far; untouched pages are not in the map")
        if not p.cpus:
            lines.append(
                f"{max(self.plan.threads, self.plan.threads_batch)} threads have fewer CPUs here, "
                "so none is pinned; fewer threads (-t), or mpirun --bind-to none, may be faster"
            )
        return "\n".join([*lines, *sorted(notes)])

    def close(self) -> None:
        """Frees the model and the job's worker. Rank 0 first stops the other ranks.

        If there is a trace, it is written, and all ranks must take part.
        """
        if self.world.rank == 0:
            self.executable.stop()
        if self.trace is not None:
            self.trace.save(self._labels())
        worker = self.executable.worker
        worker.close()
        self.free()
        worker.communicator.close()

    def free(self) -> None:
        """Frees weights, cache and buffers. The worker must not know the model any longer."""
        self.executable.close()
        if self.executable.stages is not None:
            self.executable.stages.communicator.close()
        if self.executable.communicator is not self.executable.worker.communicator:
            self.executable.communicator.close()
        self.loader.free()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Writes rank 0's part of a trace if the `with` block raises."""
        try:
            yield
        except BaseException:
            if self.trace is not None:
                self.trace.save_own(self._labels())
            raise

    def _labels(self) -> Labels:
        """Per plan of the executable: its name in a trace, and the names and layers of its steps."""
        names = ["prefill"] if self.world.size == 1 else ["prefill by tensors", "prefill by tokens"]
        names = names[: self.executable.plans]
        both = self.executable.has_logits and self.executable.has_hidden
        hidden = [f"hidden states, {name}" for name in names] if both else []
        by_host = ("rows by host" for _ in self.executable.dispatching)
        return list(zip([*names, *by_host, *hidden], self.executable.labels, strict=True))


def load_model(
    config: EngineConfig,
    world: World,
    progress: bool = False,
    measure: bool = False,
    fill: Callable[[ShardLoader], object] | None = None,
    embeddings: bool = False,
    colocation: Colocation | None = None,
) -> Model:
    """Loads this rank's part of the model at `config.model` (None: the bundled one), ready to run.

    Args:
        measure: Measure token-parallel prefill even if it was measured before.
        fill: Packs the planned weights, or starts to. None: as --repack says.
        embeddings: Hidden states are needed, so an encoder is accepted, which makes no text.
        colocation: The rank's worker, if it runs other models. The model may run after `executable.join`.

    Raises ModelFileError, ArchitectureError, CapacityError or ConfigError if the user can mend the cause, and CommError
    if ranks disagree.
    """
    checkpoint = together(
        world, lambda: open_checkpoint(config.model or BUNDLED, metadata_overrides(config.override_kv))
    )
    if world.rank == 0:
        checkpoint.warn(log)
    if not (checkpoint.spec.generates or embeddings):
        raise ConfigError(
            f"{checkpoint.path} is an encoder ({checkpoint.spec.family}), which makes no text: "
            "`ckdist serve` it and ask /v1/embeddings, or use LLM(...).embed"
        )
    if config.lora and checkpoint.spec.encoder is not None:
        raise ConfigError(f"--lora is for decoders, and {checkpoint.path} has an encoder ({checkpoint.spec.family})")
    folder = pathlib.Path(config.lora) if config.lora else None
    files = together(world, lambda: model_files(checkpoint, folder)) if world.size > 1 else []
    compare_samples(world, files)
    adapter = Adapter(folder, checkpoint.spec) if folder else None
    for note in adapter.notes if adapter and world.rank == 0 else ():
        log.warning("%s: %s", config.lora, note)
    tracer = functools.partial(Tracer, low_rank=adapter.low_rank) if adapter else Tracer
    loader = ShardLoader(checkpoint, loading_threads(config, world), config.quantize)
    config = with_chosen_layout(config, world, checkpoint)
    rank = stage_rank(world, layers_of_stages(config, world, loader, tracer))
    traced = trace_stage(config, world, rank, checkpoint, adapter, tracer, embeddings)
    tracing = (
        Trace(config.trace, world, max(config.threads or default_threads(world), config.threads_batch))
        if config.trace
        else None
    )
    shard = plan_and_open(traced, loader, config, world)
    fill = fill or (lambda loader: fill_shard(loader, config, world, progress, tracing and tracing.handle))
    with tracing.span(native.lib.ckdist_trace_load) if tracing else contextlib.nullcontext():
        fill_and_compare(loader, files, world, fill)
    return start(shard, config, world, tracing, measure, colocation)


def load_colocated(request: dict[str, Any], world: World, colocation: Colocation) -> Model:
    """Loads a model while steps of others run. `request`: fields of an EngineConfig. A collective call."""
    return load_model(EngineConfig(**request), world, colocation=colocation)


def start(
    shard: Shard,
    config: EngineConfig,
    world: World,
    tracing: Trace | None,
    measure: bool,
    colocation: Colocation | None = None,
) -> Model:
    """Builds the executable over a filled or filling shard and chooses the sharding of prefill. A collective call."""
    traced, loader, plan = shard.traced, shard.loader, shard.plan
    spec, group = traced.checkpoint.spec, traced.rank.world
    executable = bind(shard, config, world, colocation)
    stages = executable.stages
    tell_stages(world, traced, shard.weight_bytes)
    if world.rank == 0:
        log.debug("%s%s", "each stage: " if stages else "", plan)
    if world.local_rank == 0 and plan.placement.is_over_quota:
        log.warning("%s", plan.placement.note)
    with tracing.span(native.lib.ckdist_trace_choose) if tracing else contextlib.nullcontext():
        why = "threads share cores" if plan.crowded else ""
        why = "it is not measured with stages" if stages else "steps of other models run" if colocation else why
        key = functools.partial(prefill_key, world, shard, executable)
        choice = choose_prefill(config, world, executable, loader.held, key, measure and stages is None, why)
    if executable.dispatching:
        executable.dispatch_from = choose_dispatch(world, len(set(group.hosts)), spec, loader, plan, traced.link)
    if world.rank == 0 and world.size > 1:
        log.debug("prefill: %s", choice.reason)
    if world.rank == 0 and choice.ratios:
        log.debug("seconds token-parallel / tensor-parallel by tokens of a step: %s", dict(choice.ratios))
    total_bytes = sum(world.gather(shard.weight_bytes))
    if tracing:
        executable.trace(tracing.handle)
        executable.worker.trace(tracing.handle)
    return Model(
        world,
        traced.checkpoint,
        spec,
        plan,
        loader,
        shard.shards,
        traced.adapter,
        executable,
        choice,
        shard.weight_bytes,
        total_bytes,
        tracing,
    )


def bind(shard: Shard, config: EngineConfig, world: World, colocation: Colocation | None) -> Executable:
    """Makes the executable of a shard, and the rank's worker if it has none yet. A collective call."""
    traced, loader, plan = shard.traced, shard.loader, shard.plan
    weight, job = functools.partial(weight_cost, loader), colocation and colocation.communicator
    communicator, stages = open_communicators(config, world, traced, plan, weight, job)
    if colocation is None:
        threads = max(plan.threads, plan.threads_batch)
        colocation = Colocation(NativeWorker(communicator, threads, plan.placement.cpus, plan.spins), communicator, 0)
    executable = Executable(
        shard.plans,
        traced.checkpoint.spec.at_context(plan.cache.context_length),
        communicator,
        plan.cache,
        plan.threads,
        plan.threads_batch,
        colocation.worker,
        loader.handle,
        stages,
        shard.hidden_plans,
        colocation.model,
    )
    if job is None:
        executable.join()
    return executable


def choose_dispatch(world: World, hosts: int, spec: ModelSpec, loader: ShardLoader, plan: Plan, link: Link) -> int:
    """Tokens from which on a step sends rows to the hosts of their experts; sys.maxsize: never. A collective call."""
    names = [name for name in loader.checkpoint.tensors if is_expert(name)]
    number = native.lib.ckdist_activation_format(native.ffi.NULL, packed_type(loader, names[0]))
    element_bytes = native.check(native.lib.ckdist_activation_bytes(number, spec.hidden_size)) / spec.hidden_size
    direct_bytes = world.broadcast(load_thresholds().transport_direct_bytes)
    tokens = dispatch_from(spec, hosts, link, plan.cache.max_tokens, direct_bytes, element_bytes)
    if world.rank == 0:
        how = (
            "are summed over all hosts in every step"
            if tokens is None
            else f"are sent in steps of {tokens} tokens or more"
        )
        log.debug("experts: rows for the hosts that have their experts %s; %s", how, link)
    return sys.maxsize if tokens is None else tokens


def prefill_key(world: World, shard: Shard, executable: Executable) -> list[object]:
    """All that the measured choice of prefill depends on: machines, placement, program, types. A collective call."""
    plan, loader = shard.plan, shard.loader
    types = [packed_type(loader, name) for name, *_ in shard.lowered.matrices if "layers.0." in name]
    hosts = [machine_name(host) for host in world.hosts]
    own = [this_machine().model, plan.threads_batch, list(plan.placement.cpus), list(plan.placement.memory)]
    sizes = [plan.cache.max_tokens, plan.cache.context_length, plan.cache.key_type, plan.cache.value_type]
    digest = shard.traced.program.digest()
    return [hosts, world.gather(own), executable.communicator.transport, digest, types, sizes]


def make_engine(model: Model, max_waiting: int = 512) -> tuple[Engine, Tokenizer]:
    """Makes rank 0's engine over a loaded model, and the model's tokenizer."""
    tokenizer = load_tried(model.checkpoint.path, model.checkpoint.overrides)
    executable = model.executable
    stats = lambda: {
        **prefill_stats(model.prefill, executable),
        **model.loader.filled.stats(),
        **expert_stats(executable.expert_rows()),
        **(dispatch_stats(executable.dispatch_from, executable.dispatched_tokens) if executable.dispatching else {}),
    }
    lane = model.trace and model.trace.main
    engine = Engine(
        model.executable, Sampler(model.spec.vocab_size), tokenizer.eos_token_ids,
        max_waiting=max_waiting, more_stats=stats, lane=lane, dry_breakers=DryBreakers(tokenizer),
        grammars=Grammars(tokenizer, model.spec.vocab_size), start_tokens=model.spec.start_tokens,
        banned_tokens=model.spec.banned_tokens,
    )  # fmt: skip
    return engine, tokenizer


def fill_and_compare(
    loader: ShardLoader, files: list[ModelFile], world: World, fill: Callable[[ShardLoader], object]
) -> None:
    """Packs the weights, or starts to, and compares all their bytes over hosts. A collective call.

    Raises ModelFileError if they differ.
    """
    threads = min(loader.threads, MAX_READERS)
    comparison = WholeComparison(world, files, loader.byte_ranges() if files else {}, threads)
    fill(loader)
    # Background packing would free pages that the comparison must then read again, so it pauses.
    with loader.held() if comparison.has_copies else contextlib.nullcontext():
        comparison.finish()


def fill_shard(loader: ShardLoader, config: EngineConfig, world: World, progress: bool, trace: CData | None) -> None:
    """Packs all weights, or starts to, as --repack says."""
    if config.repack != "off" and not config.quantize:
        # Logged with -v alone, since it may come in the middle of a text, and only by rank 0, which reads the weights
        # of all ranks of its host.
        on_finished = (lambda filled: log.debug("%s", filled)) if world.rank == 0 else None
        loader.repack(config.repack, trace=trace, on_finished=on_finished)
        return
    if config.repack != "off" and world.rank == 0:
        log.debug("--quantize changes the weights, so all of them are packed before anything runs")
    loader.load(progress, trace)


def loading_threads(config: EngineConfig, world: World) -> int:
    """Threads that read and pack weights: as many as will run, at most one per CPU."""
    return min(max(config.threads or 0, config.threads_batch or 0), os.cpu_count() or 1) or default_threads(world)


__all__ = ["BUNDLED", "Model", "load_colocated", "load_model", "make_engine"]
