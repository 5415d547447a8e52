"""This rank's native steps, lowered from the programs of its stage."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.engine.stage_programs import StagePrograms
from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.lower import ServingLowering, stored_dims
from ckdist.program.lowered import Lowered
from ckdist.program.program import Program
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import packed_type


class RankSteps(NamedTuple):
    """The lowered programs of a rank."""

    # Decode, prompts if they have other products, prefill by tokens, and rows by host. Then the same for adapters, but
    # without rows by host.
    main: list[Lowered]
    hidden: list[Lowered]  # with hidden states in place of logits


def lower_programs(
    programs: StagePrograms, loader: ShardLoader, max_tokens: int, splits_roles: bool, slots: int = 0
) -> RankSteps:
    """Lowers all programs of a stage.

    Args:
        max_tokens: Tokens of a step.
        splits_roles: Prompts have other products than generated tokens: see `has_prompt_products`.
        slots: Slots for adapters.
    """
    mesh, adapted = programs.layouts[2], programs.adapted

    def steps_of(
        program: Program, prompts: bool, host_rows: bool = False, decode: Program = programs.decode
    ) -> Lowered:
        is_whole = programs.prefill is not None and program.inputs[0].dims[0].axis is not None
        stored = stored_dims(program, decode) if is_whole else None  # weights as decode's shards have them
        return _lower(loader, mesh, max_tokens, program, stored, prompts and splits_roles, host_rows)

    roles = (False, True) if splits_roles else (False,)
    generates = loader.checkpoint.spec.generates
    main = [steps_of(programs.decode, prompts) for prompts in (roles if generates else (True,))]
    if programs.prefill is not None:
        main.append(steps_of(programs.prefill, prompts=True))
    if programs.dispatch_hosts and programs.prefill is not None:
        main.append(steps_of(programs.prefill, prompts=True, host_rows=True))
    elif programs.dispatch_hosts:
        main += [steps_of(programs.decode, prompts, host_rows=True) for prompts in roles]
    wide = [steps_of(program, prompts) for program in adapted[:1] for prompts in roles]
    wide += [steps_of(program, prompts=True, decode=adapted[0]) for program in adapted[1:]]
    main += [replace(lowered, adapters=slots) for lowered in wide]
    return RankSteps(main, [steps_of(program, prompts=True) for program in programs.hidden])


def has_prompt_products(loader: ShardLoader, program: Program, world: World, wanted: bool) -> bool:
    """True if the kernels of any rank have a separate product for prompts for one of the program's matrices.

    A collective call. `wanted`: --prompt-tiles allows them.
    """
    lib, level = native.lib, native.ffi.NULL
    types = {packed_type(loader, w.name) for w in program.weights if len(w.dims) > 1} if wanted else set()
    own = any(lib.ckdist_prompt_format(level, t) != lib.ckdist_activation_format(level, t) for t in types)
    return any(world.gather(own))


def _lower(
    loader: ShardLoader,
    mesh: Mesh,
    max_tokens: int,
    program: Program,
    stored: Mapping[Dim, Dim] | None,
    prompts: bool,
    host_rows: bool,
) -> Lowered:
    """Lowers a program for weights in the types that the loader packs."""
    format_of = native.lib.ckdist_prompt_format if prompts else native.lib.ckdist_activation_format
    lowered = ServingLowering(
        program,
        mesh,
        formats=lambda name: format_of(native.ffi.NULL, packed_type(loader, name)),
        block_columns=lambda name: native.lib.ckdist_type_undivided_columns(packed_type(loader, name)),
        max_tokens=max_tokens,
        stored=stored,
        host_rows=host_rows,
        prompts=prompts,
    ).run()
    if any(source.scales and source.scales.order for source in loader.checkpoint.tensors.values()):
        from ckdist.program.column_orders import with_orders

        return with_orders(lowered, loader.checkpoint.tensors)
    return lowered
