"""Chooses the steps in which a model's plans run. All ranks call every function together."""

import contextlib
import functools
import logging
import sys
from typing import TYPE_CHECKING

from ckdist import native
from ckdist.comm.host_name import machine_name
from ckdist.comm.thresholds import load_thresholds
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.loaded_model import Model
from ckdist.engine.stage_programs import StagePrograms
from ckdist.layouts.prefill_choice import PrefillChoice
from ckdist.models.moe_weights import is_expert
from ckdist.program.executable import StageRanks
from ckdist.program.lowered import Lowered
from ckdist.program.program import Program
from ckdist.topology import this_machine
from ckdist.weights.packed_type import packed_type

if TYPE_CHECKING:  # few models have experts
    from ckdist.comm.transports.link import Link

log = logging.getLogger(__name__)

LEAST_THREADS = 5  # decode with fewer is not measured, nor with those of --threads


def choose_steps(
    model: Model, config: EngineConfig, programs: StagePrograms, decode: Lowered, measure: bool, colocated: bool
) -> None:
    """Sets the model's form of prefill, the threads of decode, and the tokens from which on rows go to other hosts.

    These are the hosts that have the rows' experts.

    Args:
        measure: Measure token-parallel prefill even if it was measured before.
        colocated: Steps of other models run.
    """
    world, executable = model.world, model.executable
    stages = executable.stages
    with model.trace.span(native.lib.ckdist_trace_choose) if model.trace else contextlib.nullcontext():
        why = "threads share cores" if model.plan.crowded else ""
        why = "it is not measured with stages" if stages else "steps of other models run" if colocated else why
        key = functools.partial(prefill_key, model, programs.decode, decode)
        if executable.layouts == 1:
            choice = PrefillChoice(reason=only_tensor(config, world, stages))
        else:
            from ckdist.engine.prefill_measurement import choose_prefill

            choice = choose_prefill(config, model, key, measure and stages is None, why)
        if not why and model.spec.generates and model.spec.encoder is None:
            threads = world.broadcast(0 if config.threads else executable.threads)
            if threads >= LEAST_THREADS:
                from ckdist.engine.thread_measurement import choose_threads

                own_key = [*key(), world.gather(model.plan.threads)]
                model.decode_threads = choose_threads(threads, model, own_key, measure)
    model.prefill = choice
    if executable.dispatches:
        assert programs.link is not None  # measured, because hosts share the experts
        executable.dispatch_from = dispatch_tokens(model, programs.dispatch_hosts, programs.link)
    if world.rank == 0 and world.size > 1:
        log.debug("prefill: %s", choice.reason)
    if world.rank == 0 and choice.ratios:
        log.debug("seconds token-parallel / tensor-parallel by tokens of a step: %s", dict(choice.ratios))


def only_tensor(config: EngineConfig, world: World, stages: StageRanks | None) -> str:
    """The reason why there is one form of prefill."""
    if world.size == 1:
        return "on one rank"
    if stages is not None and stages.communicator.size == 1:
        return "in stages of one rank each"
    if config.prefill == "tensor":
        return "tensor-parallel, as --prefill says"
    return "tensor-parallel (token-parallel needs ranks that share memory, evenly over hosts)"


def dispatch_tokens(model: Model, hosts: int, link: "Link") -> int:
    """Tokens from which on a step sends rows to the hosts of their experts; sys.maxsize: never. A collective call."""
    from ckdist.layouts.expert_placement import dispatch_from

    world, loader, spec = model.world, model.loader, model.spec
    names = [name for name in loader.checkpoint.tensors if is_expert(name)]
    number = native.lib.ckdist_activation_format(native.ffi.NULL, packed_type(loader, names[0]))
    element_bytes = native.check(native.lib.ckdist_activation_bytes(number, spec.hidden_size)) / spec.hidden_size
    direct_bytes = world.broadcast(load_thresholds().transport_direct_bytes)
    tokens = dispatch_from(spec, hosts, link, model.plan.cache.max_tokens, direct_bytes, element_bytes)
    if world.rank == 0:
        how = (
            "are summed over all hosts in every step"
            if tokens is None
            else f"are sent in steps of {tokens} tokens or more"
        )
        log.debug("experts: rows for the hosts that have their experts %s; %s", how, link)
    return sys.maxsize if tokens is None else tokens


def prefill_key(model: Model, program: Program, decode: Lowered) -> list[object]:
    """All that the measured choice of prefill depends on: machines, placement, program, types. A collective call."""
    world, plan = model.world, model.plan
    types = [packed_type(model.loader, name) for name, *_ in decode.matrices if "layers.0." in name]
    hosts = [machine_name(host) for host in world.hosts]
    own = [this_machine().model, plan.threads_batch, list(plan.placement.cpus), list(plan.placement.memory)]
    sizes = [plan.cache.max_tokens, plan.cache.context_length, plan.cache.key_type, plan.cache.value_type]
    return [hosts, world.gather(own), model.executable.communicator.transport, program.digest(), types, sizes]
