"""Execution plans: lowered programs over weights in memory, as the structs of `native/api/program_api.h`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckdist import native
from ckdist.program.lowered import Lowered
from ckdist.program.model_shape import ModelShape
from ckdist.program.rotations import ROPE_TABLES, rope_fields


@dataclass(frozen=True)
class ExecutionPlan:
    """A lowered program and the addresses of its weights. The owner of the weights keeps them alive."""

    lowered: Lowered
    matrices: list[int] = field(default_factory=list)  # address of the native matrix for each of `lowered.matrices`
    vectors: list[int] = field(default_factory=list)  # address of the float32 elements for each of `lowered.vectors`
    stored: Mapping[str, int] = field(default_factory=dict)  # address of the native matrix of each stored parameter

    def fields(self) -> dict[str, Any]:
        """The fields of a `struct ckdist_execution_plan`."""
        lowered = self.lowered
        lists = [
            {
                "steps": [step.native() for step in steps.steps],
                "count": len(steps.steps),
                "cleared": sorted(steps.cleared),
                "cleared_count": len(steps.cleared),
            }
            for steps in lowered.lists
        ]
        return {
            "lists": lists,
            "list_count": len(lists),
            "values": [{name: value for name, value in vars(b).items() if name != "rows"} for b in lowered.buffers],
            "value_count": len(lowered.buffers),
            "arena_bytes": lowered.arena_bytes,
            "matrices": self.matrices,
            "matrix_count": len(self.matrices),
            "vectors": self.vectors,
            "vector_count": len(self.vectors),
            "tokens_sharded": lowered.tokens_sharded,
            "host_rows": lowered.host_rows,
            "prompts": lowered.prompts,
            "parameters": [
                [p.offset, p.rows, p.columns, p.matrices, self.stored[p.name] if p.stored else None]
                for p in lowered.parameters
            ],
            "parameter_count": len(lowered.parameters),
            "packs": [[transposed, len(parameters), parameters] for transposed, parameters in lowered.packs],
            "pack_count": len(lowered.packs),
        }


def native_program(
    plans: Sequence[ExecutionPlan], spec: ModelShape, max_tokens: int, positions: int, **fields: Any
) -> native.CData:
    """The `struct ckdist_program *` of plans for steps of up to `max_tokens` tokens at `positions` positions.

    `fields`: the fields that only serving or only training has.
    """
    return native.struct(
        "ckdist_program",
        plans=[plan.fields() for plan in plans],
        plan_count=len(plans),
        max_tokens=max_tokens,
        vocab=spec.vocab_size,
        ropes=[rope_fields(spec.ropes.get(table), positions) for table in ROPE_TABLES],
        **fields,
    )
