"""Predicts the memory of a training on one rank, from its lowered steps, before anything is loaded."""

import math
from collections.abc import Mapping, Sequence

from ckdist.errors import CapacityError
from ckdist.layout import Range
from ckdist.layouts.memory_sizes import free_memory, gigabytes, room
from ckdist.mesh import Mesh
from ckdist.program.gathered_parameters import most_floats
from ckdist.program.lowered import Lowered
from ckdist.program.rotations import rope_bytes_per_position
from ckdist.program.step import PackIndex, Step
from ckdist.train import muon
from ckdist.train.loss_program import LossProgram
from ckdist.train.moments import state_floats
from ckdist.train.optimizer import STATES
from ckdist.train.ownership import ELEMENTWISE, exchanged_floats, kept_shapes, owned_ranges
from ckdist.train.shards import Shards

TILE = 16  # rows and columns of packed matrices are padded to multiples of this
KEYS, QUERIES, GRAD_QUERIES = 4096, 16, 128  # of blocks, as in native/runtime/steps/attend_grad.cpp
SUM_ROWS = 64  # tokens whose contributions to a vector are added at once
STATE_TOKENS, STATE_COLUMNS = 32, 32  # of a chunk and of a part of a state, as in native/kernels/state_gradient.h
LOGIT_BYTES = 32 << 20  # gradients of logits in memory at once, as in native/runtime/steps/cross_entropy.cpp


def training_bytes(
    lowered: Lowered,
    tokens: int,
    operand_bytes: int,
    state_bytes: int,
    waiting: Sequence[int] = (0,),
    threads: int = 1,
    ranks: int = 1,
    weight_bytes: int = 4,
) -> dict[str, int]:
    """Bytes on this rank by purpose, without quantised matrices, which keep the type of their file.

    Args:
        lowered: The lowered programs.
        tokens: Tokens of a batch.
        operand_bytes: Bytes per element of an operand.
        state_bytes: Bytes of the optimizer's state.
        waiting: For each chunk of layers: batches between their forward and backward passes.
        threads: Compute threads. Each packs the keys of a sequence.
        ranks: Ranks that divide each sequence.
        weight_bytes: Bytes per element of the trained weights.
    """
    padded = lambda n: -(-n // TILE) * TILE

    def packed(pack: int) -> int:
        """Bytes of one pack of matrices."""
        _, parts = lowered.packs[pack]
        shapes = [(lowered.parameters[p].rows, lowered.parameters[p].columns) for p in parts]
        return operand_bytes * sum(padded(rows) * padded(columns) for rows, columns in shapes)

    is_frozen = lambda p: lowered.parameters[p].offset >= lowered.trained_floats and not lowered.parameters[p].stored
    frozen = [i for i, (_, parts) in enumerate(lowered.packs) if all(map(is_frozen, parts))]

    def workspace(step: Step) -> int:
        """Bytes of a step's temporary memory.

        Packed matrices; for the loss also gradients of logits of some tokens; for experts only their rows and sums.
        """
        packs, logits = step.operands(PackIndex), 0
        if step.kind.startswith("attend"):
            return _gathered_bytes(lowered, step, tokens, operand_bytes, ranks) if ranks > 1 else 0
        if step.kind == "convolve_grad":
            return _kernel_bytes(lowered, step, tokens)
        if step.kind.startswith("grouped_experts"):
            return _expert_bytes(lowered, step, tokens)
        if step.kind == "cross_entropy":
            vocab = lowered.parameters[lowered.packs[packs[0]][1][0]].rows
            logits = min(LOGIT_BYTES, tokens * padded(vocab) * operand_bytes)
        return logits + sum(packed(i) for i in packs if i not in frozen)

    trained = 4 * lowered.trained_floats
    return {
        "trained weights": weight_bytes * lowered.trained_floats,
        "gradients": trained,
        "optimizer state": state_bytes,
        "frozen weights": 4 * lowered.floats - trained + sum(map(packed, frozen)),
        "activations": lowered.arena_bytes + sum(kept * n for kept, n in zip(lowered.kept_bytes, waiting, strict=True)),
        "workspace": max(map(workspace, lowered.steps), default=0),
        "keys of threads": threads * max(_key_bytes(lowered, s, tokens * ranks, operand_bytes) for s in lowered.steps),
    }


def _widths(lowered: Lowered, step: Step) -> tuple[int, int, int]:
    """Elements of a row of keys and of values of one head, and kv-heads, of an attention."""
    width = lambda name: lowered.buffers[step.fields[name]].width
    heads = width("log_sum_exp")
    return width("q") // heads, width("out") // heads, width("k") // (width("q") // heads)


def _key_bytes(lowered: Lowered, step: Step, keys: int, operand_bytes: int) -> int:
    """Bytes of a thread for one kv-head of a sequence of `keys` tokens, packed and as gradients."""
    if step.kind in ("delta_packed", "delta_grad"):
        return _state_bytes(lowered, step, keys)
    if not step.kind.startswith("attend"):
        return 0
    key, value, _ = _widths(lowered, step)
    part = min(keys, KEYS)
    if step.kind == "attend_packed":
        return keys * ((key + value + QUERIES) * operand_bytes + 4 * QUERIES)
    block = part * (2 * GRAD_QUERIES * operand_bytes + QUERIES * (8 + operand_bytes))
    return keys * ((2 * key + value) * operand_bytes + 4 * (key + value)) + block


def _expert_bytes(lowered: Lowered, step: Step, tokens: int) -> int:
    """Bytes of the rows of experts, and of their sums."""
    used, ffn = (lowered.buffers[step.fields[name]].width for name in ("chosen", "gate"))
    return 4 * tokens * used * (2 + -(-ffn // TILE))


def _kernel_bytes(lowered: Lowered, step: Step, tokens: int) -> int:
    """Bytes of the partial gradients of a short convolution's kernel, and of its bias."""
    return 4 * -(-tokens // SUM_ROWS) * (step.fields["taps"] + 1) * lowered.buffers[step.fields["x"]].width


def _state_bytes(lowered: Lowered, step: Step, tokens: int) -> int:
    """Bytes of a thread for the tokens and states of a head, as in native/runtime/steps/delta_packed.cpp."""
    key = lowered.buffers[step.fields["q"]].width // step.fields["key_heads"]
    rows = tokens * (2 * key + (key if step.fields["by_row"] else 1) + 1)
    if step.kind == "delta_packed":
        return 4 * (rows + (2 * tokens * key if step.fields["by_row"] else 0))
    return 4 * (2 * rows + tokens + key * STATE_COLUMNS * (-(-tokens // STATE_TOKENS) + STATE_TOKENS + 2))


def _gathered_bytes(lowered: Lowered, step: Step, tokens: int, operand_bytes: int, ranks: int) -> int:
    """Bytes of the keys and values of all ranks and of this one, and of their gradients, on this rank."""
    key, value, heads = _widths(lowered, step)
    gradients = 4 if step.kind == "attend_grad" else 0
    return tokens * (ranks + 1) * heads * (key + value) * (operand_bytes + gradients)


def rank_bytes(optim: str, zero_stage: int, program: LossProgram, mesh: Mesh, threads: int) -> dict[str, int]:
    """Bytes of a rank of `mesh` by purpose, for a lowered `program`. `optim`, `zero_stage`: as of TrainConfig."""
    ranks, shards = mesh.size("sp"), program.trained_shards
    replicas = mesh.size("dp") * ranks if zero_stage or optim == "muon" else 1
    place = mesh.index("dp") * ranks + mesh.index("sp") if replicas > 1 else 0
    own = owned_ranges(optim, shards.shapes, replicas, shards)[place]
    state = 4 * _state_floats(optim, shards, own, mesh.size("tp"))
    sizes = program.max_tokens, program.operand_bytes, state, program.stage.waiting
    weight_bytes = program.weight_bytes
    needed = training_bytes(program.lowered, *sizes, threads, ranks, weight_bytes)
    update, freed = 4 * _update_floats(optim, shards, own, mesh.size("tp"), weight_bytes < 4), 0
    if zero_stage and replicas > 1:
        needed |= _sharded_bytes(program.lowered, own, zero_stage, weight_bytes)
        freed = 4 * sum(most_floats(program.lowered, own)) if zero_stage > 1 else 0
    needed["update"] = max(0, update - freed)
    needed["rotations"] = program.positions * rope_bytes_per_position(program.spec)
    needed["rows for other stages"] = 4 * program.messages * program.message_floats
    return needed


def _state_floats(optim: str, shards: Shards, own: Range, tensor_ranks: int) -> int:
    """Floats of the optimizer's state of the rank that owns the floats `own` of its shards."""
    if optim in ELEMENTWISE:
        return (own[1] - own[0]) * len(STATES[optim])
    return state_floats(optim, STATES[optim], kept_shapes(shards.shapes, own, shards if tensor_ranks > 1 else None))


def _update_floats(optim: str, shards: Shards, own: Range, tensor_ranks: int, is_narrow: bool) -> int:
    """Floats of the arrays of an update that needs whole parameters."""
    if optim in ELEMENTWISE:
        return 0
    kept = kept_shapes(shards.shapes, own, shards if tensor_ranks > 1 else None)
    matrices = [shape for name, shape in kept.items() if optim == "muon" and muon.is_matrix(name, shape)]
    products = max((muon.update_floats(*shape) + is_narrow * math.prod(shape) for shape in matrices), default=0)
    exchanged = exchanged_floats(shards.shapes, own, shards) if tensor_ranks > 1 else 0
    return max(exchanged, exchanged // 2 + products)


def _sharded_bytes(lowered: Lowered, own: Range, zero_stage: int, weight_bytes: int) -> dict[str, int]:
    """Bytes of the trained weights and gradients of the rank that owns the floats `own` of them (ZeRO)."""
    share, most = own[1] - own[0], most_floats(lowered, own)
    held = {"gradients": 4 * (share + (most.gradients if zero_stage > 1 else lowered.trained_floats))}
    if zero_stage > 2:
        held["trained weights"] = weight_bytes * (share + most.gathered)
    return held


def memory_line(of: str, needed: Mapping[str, int]) -> str:
    """One line with the memory of a rank, by purpose. `of` is its beginning."""
    parts = ", ".join(f"{gigabytes(size)} {name}" for name, size in needed.items() if size)
    return f"{of}: {gigabytes(sum(needed.values()))} on each rank ({parts})"


def require(needed: Mapping[str, int], ranks_on_host: int, remedy: str) -> None:
    """Raises CapacityError, with the sum and its parts, if they exceed the free memory of this rank."""
    free, total = free_memory(ranks_on_host), sum(needed.values())
    if total > free:
        parts = ", ".join(f"{gigabytes(size)} of {name}" for name, size in needed.items() if size)
        raise CapacityError(f"training needs {gigabytes(total)} on each rank ({parts}), and {room(free)}: {remedy}")
