"""Predicts the memory of a training on one rank, from its lowered steps, before anything is loaded."""

import math
from collections.abc import Mapping

from ckdist.errors import CapacityError
from ckdist.layout import Range
from ckdist.layouts.memory_sizes import free_memory, gigabytes, room
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
KEYS, QUERIES, GRAD_QUERIES = 4096, 32, 128  # of blocks, as in native/runtime/steps/attend_grad.cpp
SUM_ROWS = 64  # tokens whose contributions to a vector are added at once
STATE_TOKENS, STATE_COLUMNS = 32, 32  # of a chunk and of a part of a state, as in native/kernels/state_gradient.h
LOGIT_BYTES = 64 << 20  # gradients of logits in memory at once, as in native/runtime/steps/cross_entropy.cpp


class _StepBytes:
    """The temporary memory of a program's steps on this rank."""

    def __init__(self, program: LossProgram) -> None:
        self.lowered, self.tokens, self.operand_bytes = program.lowered, program.max_tokens, program.operand_bytes
        self.ranks = program.shards.mesh.size("sp")  # that divide each sequence
        is_frozen = lambda p: p.offset >= self.lowered.trained_floats and not p.stored
        frozen = {i for i, p in enumerate(self.lowered.parameters) if is_frozen(p)}
        self.packed_once = {i for i, (_, parts) in enumerate(self.lowered.packs) if frozen.issuperset(parts)}

    def packed(self, pack: int) -> int:
        """Bytes of one pack of matrices."""
        parameters = [self.lowered.parameters[p] for p in self.lowered.packs[pack][1]]
        return self.operand_bytes * sum(_padded(p.rows) * _padded(p.columns) for p in parameters)

    def workspace(self, step: Step) -> int:
        """Bytes of a step's temporary memory.

        Packed matrices, and rows that products read (with AMX); for the loss also gradients of logits of some tokens;
        for experts only their rows and sums.
        """
        packs, logits = step.operands(PackIndex), 0
        if step.kind.startswith("attend"):
            return self._gathered(step) if self.ranks > 1 else 0
        if step.kind == "convolve_grad":  # partial gradients of the kernel, and of its bias
            return 4 * -(-self.tokens // SUM_ROWS) * (step.fields["taps"] + 1) * self._width(step, "x")
        if step.kind.startswith("grouped_experts"):
            return 4 * self.tokens * self._width(step, "chosen") * (2 + -(-self._width(step, "gate") // TILE))
        if step.kind == "cross_entropy":
            vocab = self.lowered.parameters[self.lowered.packs[packs[0]][1][0]].rows
            logits = min(LOGIT_BYTES, self.tokens * _padded(vocab) * self.operand_bytes)
        rows = logits
        if step.kind.startswith("matmul"):
            rows = self.tokens * self._columns(packs[0]) * self.operand_bytes
        if self.operand_bytes > 2:
            rows = 0
        return logits + rows + sum(self.packed(i) for i in packs if i not in self.packed_once)

    def _columns(self, pack: int) -> int:
        transposed, numbers = self.lowered.packs[pack]
        parameters = [self.lowered.parameters[p] for p in numbers]
        return sum(_padded(p.rows) for p in parameters) if transposed else parameters[0].columns

    def of_thread(self, step: Step) -> int:
        """Bytes of a thread for one kv-head of a sequence: keys and values, packed and as gradients; or states."""
        keys = self.tokens * self.ranks
        if step.kind in ("delta_packed", "delta_grad"):
            return self._states(step, keys)
        if not step.kind.startswith("attend"):
            return 0
        key, value, _ = self._heads(step)
        if step.kind == "attend_packed":
            return keys * ((key + value + QUERIES) * self.operand_bytes + 4 * QUERIES)
        block = min(keys, KEYS) * (2 * GRAD_QUERIES * self.operand_bytes + QUERIES * (8 + self.operand_bytes))
        return keys * ((2 * key + value) * self.operand_bytes + 4 * (key + value)) + block

    def _width(self, step: Step, name: str) -> int:
        return self.lowered.buffers[step.fields[name]].width

    def _heads(self, step: Step) -> tuple[int, int, int]:
        """Elements of a row of keys and of values of one head, and kv-heads, of an attention."""
        heads = self._width(step, "log_sum_exp")
        key = self._width(step, "q") // heads
        return key, self._width(step, "out") // heads, self._width(step, "k") // key

    def _states(self, step: Step, tokens: int) -> int:
        """For the tokens and states of a head, as in native/runtime/steps/delta_packed.cpp."""
        key = self._width(step, "q") // step.fields["key_heads"]
        rows = tokens * (2 * key + (key if step.fields["by_row"] else 1) + 1)
        if step.kind == "delta_packed":
            return 4 * (rows + (2 * tokens * key if step.fields["by_row"] else 0))
        return 4 * (2 * rows + tokens + key * STATE_COLUMNS * (-(-tokens // STATE_TOKENS) + STATE_TOKENS + 2))

    def _gathered(self, step: Step) -> int:
        """Keys and values of all ranks and of this one, and their gradients."""
        key, value, heads = self._heads(step)
        gradients = 4 if step.kind == "attend_grad" else 0
        return self.tokens * (self.ranks + 1) * heads * (key + value) * (self.operand_bytes + gradients)


def _padded(n: int) -> int:
    return -(-n // TILE) * TILE


def training_bytes(program: LossProgram, state_bytes: int, threads: int = 1) -> dict[str, int]:
    """Bytes on this rank by purpose, without quantised matrices, which keep the type of their file.

    Args:
        state_bytes: Bytes of the optimizer's state.
        threads: Compute threads. Each packs the keys of a sequence.
    """
    lowered, of_steps, trained = program.lowered, _StepBytes(program), 4 * program.lowered.trained_floats
    kept = sum(size * n for size, n in zip(lowered.kept_bytes, program.stage.waiting, strict=True))
    return {
        "trained weights": program.weight_bytes * lowered.trained_floats,
        "gradients": trained,
        "optimizer state": state_bytes,
        "frozen weights": 4 * lowered.floats - trained + sum(map(of_steps.packed, of_steps.packed_once)),
        "activations": lowered.arena_bytes + kept,
        "workspace": max(map(of_steps.workspace, lowered.steps), default=0),
        "keys of threads": threads * max(map(of_steps.of_thread, lowered.steps)),
    }


def rank_bytes(optim: str, program: LossProgram, threads: int) -> dict[str, int]:
    """Bytes of a rank by purpose, for a lowered `program`. `optim`: as of TrainConfig."""
    shards, zero_stage = program.trained_shards, program.zero_stage
    mesh = shards.mesh
    replicas = mesh.size("dp") * mesh.size("sp") if zero_stage or optim == "muon" else 1
    place = mesh.index("dp") * mesh.size("sp") + mesh.index("sp") if replicas > 1 else 0
    own = owned_ranges(optim, shards.shapes, replicas, shards)[place]
    state, update = _optimizer_floats(optim, shards, own, program.weight_bytes < 4)
    needed, freed = training_bytes(program, 4 * state, threads), 0
    if zero_stage and replicas > 1:
        needed |= _sharded_bytes(program.lowered, own, zero_stage, program.weight_bytes)
        freed = 4 * sum(most_floats(program.lowered, own)) if zero_stage > 1 else 0
    needed["update"] = max(0, 4 * update - freed)
    needed["rotations"] = program.positions * rope_bytes_per_position(program.spec)
    needed["rows for other stages"] = 4 * program.messages * program.message_floats
    return needed


def _optimizer_floats(optim: str, shards: Shards, own: Range, is_narrow: bool) -> tuple[int, int]:
    """Floats of the optimizer's state of the rank that owns the floats `own` of its shards, and of an update."""
    if optim in ELEMENTWISE:
        return (own[1] - own[0]) * len(STATES[optim]), 0
    has_shards = shards.mesh.size("tp") > 1
    kept = kept_shapes(shards.shapes, own, shards if has_shards else None)
    matrices = [shape for name, shape in kept.items() if optim == "muon" and muon.is_matrix(name, shape)]
    products = max((muon.update_floats(*shape) + is_narrow * math.prod(shape) for shape in matrices), default=0)
    exchanged = exchanged_floats(shards.shapes, own, shards) if has_shards else 0
    return state_floats(optim, STATES[optim], kept), max(exchanged, exchanged // 2 + products)


def _sharded_bytes(lowered: Lowered, own: Range, zero_stage: int, weight_bytes: int) -> dict[str, int]:
    """Bytes of the trained weights and gradients of the rank that owns the floats `own` of them (ZeRO)."""
    share, most = own[1] - own[0], most_floats(lowered, own)
    held = {"gradients": 4 * (share + (most.gradients if zero_stage > 1 else lowered.trained_floats))}
    if zero_stage > 2:
        held["trained weights"] = weight_bytes * (share + most.gathered)
    return held


def memory_text(needed: Mapping[str, int]) -> str:
    """The memory of a rank, in all and by purpose."""
    parts = ", ".join(f"{gigabytes(size)} {name}" for name, size in needed.items() if size)
    return f"{gigabytes(sum(needed.values()))} on each rank ({parts})"


def require(needed: Mapping[str, int], ranks_on_host: int, remedy: str) -> None:
    """Raises CapacityError, with the sum and its parts, if they exceed the free memory of this rank."""
    free = free_memory(ranks_on_host)
    if sum(needed.values()) > free:
        raise CapacityError(f"training needs {memory_text(needed)}, and {room(free)}: {remedy}")
