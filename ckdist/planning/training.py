"""What a training takes on one rank of its mesh, from its steps, before anything is loaded."""

from collections.abc import Mapping, Sequence

from ckdist.planning.memory import gigabytes
from ckdist.program.lowered_training import LoweredTraining
from ckdist.program.step import PackIndex, Step

TILE = 16  # rows and columns that packed matrices are padded to
LOGIT_BYTES = 32 << 20  # gradients by logits that exist at once, as in native/runtime/steps/cross_entropy.cpp


def training_bytes(
    lowered: LoweredTraining,
    tokens: int,
    operand_bytes: int,
    state_arrays: int,
    state_replicas: int,
    waiting: Sequence[int] = (0,),
) -> dict[str, int]:
    """Bytes by what they hold, on this rank; without quantised matrices, which stay as their file has them.

    `tokens`: of a batch; `operand_bytes`: of an element that products read; `state_arrays`: of the optimizer's state,
    each as large as the trained weights, shared by so many replicas; `waiting`: of each chunk of layers batches between
    their forward and their backward pass.
    """
    padded = lambda n: -(-n // TILE) * TILE

    def packed(pack: int) -> int:
        """Of one matrix as products read it."""
        _, parts = lowered.packs[pack]
        shapes = [(lowered.parameters[p].rows, lowered.parameters[p].columns) for p in parts]
        return operand_bytes * sum(padded(rows) * padded(columns) for rows, columns in shapes)

    is_frozen = lambda p: lowered.parameters[p].offset >= lowered.trained_floats and not lowered.parameters[p].stored
    frozen = [i for i, (_, parts) in enumerate(lowered.packs) if all(map(is_frozen, parts))]

    def workspace(step: Step) -> int:
        """Of a step: what it packs, of the loss the gradients by the logits of some tokens, and of experts their rows
        with what is summed of them.
        """
        packs = step.operands(PackIndex)
        logits = 0
        if step.kind.startswith("grouped_experts"):
            used, ffn = (lowered.values[step.fields[name]].width for name in ("chosen", "gate"))
            return 4 * tokens * used * (2 + padded(ffn) // TILE)
        if step.kind == "cross_entropy":
            vocab = lowered.parameters[lowered.packs[packs[0]][1][0]].rows
            logits = min(LOGIT_BYTES, tokens * padded(vocab) * operand_bytes)
        return logits + sum(packed(i) for i in packs if i not in frozen)

    trained = 4 * lowered.trained_floats
    return {
        "trained weights": trained,
        "gradients": trained,
        "optimizer state": trained * state_arrays // state_replicas,
        "frozen weights": 4 * lowered.floats - trained + sum(map(packed, frozen)),
        "activations": lowered.arena_bytes
        + sum(c.kept_bytes * n for c, n in zip(lowered.chunks, waiting, strict=True)),
        "workspace": max(map(workspace, lowered.steps), default=0),
    }


def memory_line(of: str, needed: Mapping[str, int]) -> str:
    """What a rank of a mesh or of a stage takes, in a line."""
    parts = ", ".join(f"{gigabytes(size)} {name}" for name, size in needed.items() if size)
    return f"{of}: {gigabytes(sum(needed.values()))} on each rank ({parts})"
