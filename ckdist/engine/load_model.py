"""Loads a model, from its path to steps that can run.

Every function here is called by all ranks of a world together.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckdist import native
from ckdist.comm.bootstrap.launchers import KEPT_VARIABLE
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.loaded_model import Model
from ckdist.engine.rank_executable import bind
from ckdist.engine.rank_steps import RankSteps, has_prompt_products, lower_programs
from ckdist.engine.rank_weights import RankWeights, check_quantize
from ckdist.engine.stage_programs import trace_programs
from ckdist.engine.stage_ranks import StageRank, log_stages, stage_rank
from ckdist.engine.step_choices import choose_steps
from ckdist.errors import ConfigError
from ckdist.hub.bundled import BUNDLED
from ckdist.layout import Layout, Range
from ckdist.layouts.memory_sizes import WeightBytes
from ckdist.layouts.rank_plan import make_plan, step_tokens
from ckdist.mesh import Mesh
from ckdist.models.spec import LEAST_UBATCH, ModelSpec
from ckdist.native import CData
from ckdist.overrides import metadata_overrides
from ckdist.program.tracer import Tracer
from ckdist.topology import default_threads
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.loader import ShardLoader
from ckdist.worker.colocation import Colocation

if TYPE_CHECKING:
    from ckdist.engine.disk_cache import DiskCache
    from ckdist.engine.named_adapters import Adapters
    from ckdist.engine.trace import Trace
    from ckdist.weights.adapter import Adapter
    from ckdist.weights.adapter_slots import AdapterSlots
    from ckdist.weights.model_files import ModelFile

log = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    world: World,
    progress: bool = False,
    measure: bool = False,
    fill: Callable[[ShardLoader], object] | None = None,
    embeddings: bool = False,
    colocation: Colocation | None = None,
    checkpoint: Checkpoint | None = None,
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
    checkpoint = checkpoint or open_model(config, world, embeddings)
    checkpoint, adapter, files = open_adapter(config, world, checkpoint)
    slots = open_slots(config, checkpoint)
    tracer = functools.partial(Tracer, low_rank=adapter.low_rank) if adapter else Tracer
    loader = open_loader(config, world, checkpoint)
    config, layers, shares = with_stages(config, world, loader, tracer)
    rank = stage_rank(world, layers, shares)
    programs = trace_programs(config, world, rank, checkpoint.spec, adapter, slots, tracer, embeddings)
    trace = open_trace(config, world)
    # their steps, and the weights that these read
    splits_roles = has_prompt_products(loader, programs.decode, world, config.prompt_tiles == "auto")
    lower = functools.partial(lower_programs, programs, loader, splits_roles=splits_roles, slots=config.adapter_slots)
    steps = lower(step_tokens(config, checkpoint.spec))
    weights = RankWeights(loader, adapter or slots)
    own = steps.main[:1] + [one for one in steps.main if one.adapters] + steps.hidden * bool(checkpoint.spec.encoder)
    for lowered in own:
        weights.add(lowered)
    check_quantize(loader, steps.main[0], world)
    sizes = weights.sizes()
    caches = {layer: cache for lowered in own for layer, cache in lowered.caches.items()}
    config, steps, step_bytes = with_fitting_steps(config, world, checkpoint.spec, sizes, steps, lower)
    plan = make_plan(config, rank.part_of(checkpoint.spec), world, sizes, programs.layouts, caches.values(), step_bytes)
    weights.open(plan.placement, rank.world, shared=programs.prefill is not None)
    plans, hidden_plans = ([weights.plan(lowered) for lowered in some] for some in steps)
    fill = fill or (lambda loader: fill_shard(loader, config, world, progress, trace and trace.handle))
    with trace.span(native.lib.ckdist_trace_load) if trace else contextlib.nullcontext():
        fill_and_compare(loader, files, world, fill)
    executable = bind(config, world, rank, programs.decode, plan, loader, plans, hidden_plans, colocation)
    model = Model(world, checkpoint, plan, loader, weights.shards, adapter or slots, executable, sizes.total, trace)
    model.adapters = open_adapters(config, world, slots)
    log_plan(model, rank)
    choose_steps(model, config, programs, steps.main[0], measure, colocation is not None)
    model.disk = open_disk(config, model)
    model.total_weight_bytes = sum(world.gather(sizes.total))
    model.draft = open_draft(config, model)
    if trace:
        executable.trace(trace.handle)
        executable.worker.trace(trace.handle)
    return model


def with_fitting_steps(
    config: EngineConfig,
    world: World,
    spec: ModelSpec,
    sizes: WeightBytes,
    steps: RankSteps,
    lower: Callable[[int], RankSteps],
) -> tuple[EngineConfig, RankSteps, int]:
    """Gives a mixture's steps fewer tokens if the memory demands it. The third: more bytes of rows than usual."""
    if config.ubatch_size or spec.usual_ubatch <= LEAST_UBATCH:
        return config, steps, 0
    from ckdist.layouts.step_rows import fitting_step

    config, step_bytes = fitting_step(config, spec, world, sizes, [*steps.main, *steps.hidden])
    return config, lower(config.ubatch_size) if config.ubatch_size else steps, step_bytes


def open_loader(config: EngineConfig, world: World, checkpoint: Checkpoint) -> ShardLoader:
    """The loader, with the packed weights of the last start if a process holds them."""
    loader = ShardLoader(checkpoint, loading_threads(config, world), config.quantize)
    if KEPT_VARIABLE in os.environ and not config.no_keep_weights:
        from ckdist.weights.kept_weights import inherited_weights

        loader.kept = inherited_weights()
    return loader


def with_stages(
    config: EngineConfig, world: World, loader: ShardLoader, tracer: Callable[[Layout, Mesh], Tracer]
) -> tuple[EngineConfig, list[Range], tuple[int, ...]]:
    """The configuration with its number of stages, the layers of each, and the shares of ranks. A collective call."""
    if world.size == 1 and (config.pipeline_parallel_size or 1) == 1 and config.layout is None:
        return dataclasses.replace(config, pipeline_parallel_size=1), [(0, len(loader.checkpoint.spec.layers))], ()
    from ckdist.engine.stage_layers import layers_of_stages, open_shares, with_chosen_layout

    config, shares = with_chosen_layout(config, world, loader.checkpoint), open_shares(config, world, loader.checkpoint)
    return config, layers_of_stages(config, world, loader, tracer, shares), shares


def open_model(config: EngineConfig, world: World, embeddings: bool) -> Checkpoint:
    """Opens the model's files. Raises ConfigError if the model does not suit the command or --lora."""
    if config.cache_disk is not None:
        from ckdist.engine.cache_folder import check_directory

        together(world, functools.partial(check_directory, config.cache_disk))
    checkpoint = together(
        world, lambda: open_checkpoint(config.model or BUNDLED, metadata_overrides(config.override_kv))
    )
    if world.rank == 0:
        checkpoint.warn(log, "without --spec mtp" if config.spec == "mtp" else None)
    if not (checkpoint.spec.generates or embeddings):
        raise ConfigError(
            f"{checkpoint.path} is an encoder ({checkpoint.spec.family}), which makes no text: "
            "`ckdist serve` it and ask /v1/embeddings, or use LLM(...).embed"
        )
    if (config.lora or config.adapter_slots) and checkpoint.spec.encoder is not None:
        raise ConfigError(f"--lora is for decoders, and {checkpoint.path} has an encoder ({checkpoint.spec.family})")
    return checkpoint


def open_adapter(
    config: EngineConfig, world: World, checkpoint: Checkpoint
) -> tuple[Checkpoint, "Adapter | None", "list[ModelFile]"]:
    """Compares samples of all files over hosts, and opens the adapter.

    Returns:
        The model, with the adapter's head if it has one, the adapter, and the files to compare whole.
    """
    folder = pathlib.Path(config.fixed_adapter) if config.fixed_adapter else None
    files: list[ModelFile] = []
    if world.size > 1:
        from ckdist.weights.copies import compare_samples
        from ckdist.weights.model_files import model_files

        files = together(world, lambda: model_files(checkpoint, folder))
        files = files if compare_samples(world, files) else []
    if folder is None:
        return checkpoint, None, files
    from ckdist.weights.adapter import Adapter

    adapter = Adapter(folder, checkpoint.spec)
    for note in adapter.notes if world.rank == 0 else ():
        log.warning("%s: %s", config.fixed_adapter, note)
    if adapter.head is not None:
        checkpoint = dataclasses.replace(checkpoint, unread=(adapter.head, *checkpoint.unread))
    return checkpoint, adapter, files


def open_slots(config: EngineConfig, checkpoint: Checkpoint) -> "AdapterSlots | None":
    """The slots of adapters that requests name. None if there are none."""
    if not config.adapter_slots:
        return None
    from ckdist.weights.adapter_slots import AdapterSlots

    return AdapterSlots(checkpoint.spec, config.adapter_slots, config.max_lora_rank)


def open_adapters(config: EngineConfig, world: World, slots: "AdapterSlots | None") -> "Adapters | None":
    """Loads the adapters that --lora names into slots. A collective call."""
    if slots is None:
        return None
    from ckdist.engine.named_adapters import Adapters

    return Adapters(world, slots, config.named_adapters)


def open_disk(config: EngineConfig, model: Model) -> "DiskCache | None":
    """Opens the cache that --cache-disk names. A collective call."""
    if config.cache_disk is None:
        return None
    from ckdist.engine.disk_cache import open_disk_cache

    return open_disk_cache(config.cache_disk, config, model)


def open_draft(config: EngineConfig, model: Model) -> Model | None:
    """Loads the draft model that --model-draft names, or the layer of --spec mtp. A collective call."""
    if not config.has_draft_model:
        return None
    from ckdist.engine.draft_model import load_draft_model

    return load_draft_model(config, model)


def open_trace(config: EngineConfig, world: World) -> "Trace | None":
    """Makes the rank's trace if --trace wants one."""
    if not config.trace:
        return None
    from ckdist.engine.trace import Trace

    return Trace(config.trace, world, max(default_threads(world, config.threads), config.threads_batch))


def log_plan(model: Model, rank: StageRank) -> None:
    """Logs the stages and the plan of the ranks, and warns of a quota that has too few CPUs. A collective call."""
    world, plan = model.world, model.plan
    log_stages(world, rank, model.weight_bytes)
    if world.rank == 0:
        log.debug("%s%s", "each stage: " if model.executable.stages else "", plan)
    if world.local_rank == 0 and plan.placement.is_over_quota:
        log.warning("%s", plan.placement.note)


def fill_and_compare(
    loader: ShardLoader, files: "list[ModelFile]", world: World, fill: Callable[[ShardLoader], object]
) -> None:
    """Packs the weights, or starts to, and compares the bytes of `files` over hosts. A collective call.

    Raises ModelFileError if they differ.
    """
    if not files:
        fill(loader)
        return
    from ckdist.weights.whole_comparison import MAX_READERS, WholeComparison

    comparison = WholeComparison(world, files, loader.byte_ranges(), min(loader.threads, MAX_READERS), loader.kept)
    fill(loader)
    # Background packing would free pages that the comparison must then read again, so it pauses.
    with loader.held() if comparison.has_copies else contextlib.nullcontext():
        comparison.finish()


def fill_shard(loader: ShardLoader, config: EngineConfig, world: World, progress: bool, trace: CData | None) -> None:
    """Packs all weights, or starts to, as --repack says."""
    if config.repack != "off" and not config.quantize:
        # With -v alone, since it may come in the middle of a text. Rank 0 reads the weights of all ranks of its host.
        on_finished = (lambda filled: log.debug("%s", filled)) if world.rank == 0 else None
        loader.repack(trace=trace, on_finished=on_finished)
        return
    if config.repack != "off" and world.rank == 0:
        log.debug("--quantize changes the weights, so all of them are packed before anything runs")
    loader.load(progress, trace)


def loading_threads(config: EngineConfig, world: World) -> int:
    """Threads that read and pack weights: as many as will run, at most one per CPU."""
    return default_threads(world, min(max(config.threads, config.threads_batch), os.cpu_count() or 1))
