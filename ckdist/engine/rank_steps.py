"""This rank's native steps, lowered from the programs of its stage."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from ckdist import native
from ckdist.engine.stage_programs import StagePrograms
from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.lower import lower, stored_dims
from ckdist.program.lowered import Lowered
from ckdist.program.program import Program
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import packed_type


class RankSteps(NamedTuple):
    """The lowered programs of a rank."""

    main: list[Lowered]  # decode, prefill if that shards tokens, and one whose rows go to the hosts of their experts
    hidden: list[Lowered]  # with hidden states in place of logits


def lower_programs(programs: StagePrograms, loader: ShardLoader, max_tokens: int) -> RankSteps:
    """Lowers all programs of a stage. `max_tokens`: of a step."""
    steps_of = functools.partial(_lower, loader, programs.layouts[2], max_tokens)

    def stored(program: Program) -> dict[Dim, Dim] | None:
        """The dimensions of weights as decode's shards have them, if the program shards tokens."""
        is_whole = programs.prefill is not None and program.inputs[0].dims[0].axis is not None
        return stored_dims(program, programs.decode) if is_whole else None

    mains = [programs.decode] if programs.prefill is None else [programs.decode, programs.prefill]
    main, hidden = ([steps_of(one, stored(one)) for one in some] for some in (mains, programs.hidden))
    if programs.dispatch_hosts:
        main.append(steps_of(mains[-1], stored(mains[-1]), host_rows=True))
    return RankSteps(main, hidden)


def _lower(
    loader: ShardLoader,
    mesh: Mesh,
    max_tokens: int,
    program: Program,
    stored: Mapping[Dim, Dim] | None,
    host_rows: bool = False,
) -> Lowered:
    """Lowers a program for weights in the types that the loader packs."""
    return lower(
        program,
        mesh,
        formats=lambda name: native.lib.ckdist_activation_format(native.ffi.NULL, packed_type(loader, name)),
        block_columns=lambda name: native.lib.ckdist_type_undivided_columns(packed_type(loader, name)),
        max_tokens=max_tokens,
        stored=stored,
        host_rows=host_rows,
    )
