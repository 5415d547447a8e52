"""Python interface of the native executor for serving. Rank 0 runs batches; the other ranks work until stopped."""

import functools
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckdist import native
from ckdist.errors import NativeError
from ckdist.program.cache import CacheTypes
from ckdist.program.execution_plan import ExecutionPlan, native_program
from ckdist.program.lowered import Lowered
from ckdist.program.model_shape import ModelShape
from ckdist.program.native_worker import COMMANDS, NativeWorker
from ckdist.program.stage_costs import StageCosts
from ckdist.program.step_batch import Batch

if TYPE_CHECKING:  # a program does not need the modules that open a communicator
    from ckdist.comm.communicator import Communicator

_ALIGNMENT = 1 << 16  # bytes that the communicator's arena may lose to the alignment of one array
_HEADER = native.ffi.sizeof("struct ckdist_run") // 4  # int32 items of a message before its arrays
_COPY_HEADER = native.ffi.sizeof("struct ckdist_copy_blocks") // 4
SLABS = native.numbers("ckdist_slab_kind", "ckdist_slab_")  # kinds of entries on disk, by name
SLABS.pop("kinds")
DECODE, PREFILL = 0, 1  # layouts of plans: that of decode, and another for prefill
SINGLE_ROWS = 2  # most tokens of a step that waits for memory and barriers alone


class PlanKey(NamedTuple):
    """The kind of an execution plan."""

    hidden: bool = False  # it makes hidden states in place of logits
    prompts: bool = False  # it has the products of prompts
    sharded: bool = False  # each rank has a range of the tokens
    by_host: bool = False  # hosts share out the rows
    adapted: bool = False  # sequences may have adapters

    @staticmethod
    def of(lowered: Lowered, hidden: bool) -> "PlanKey":
        """The key of a lowered program."""
        by_host, adapted = lowered.host_rows != "none", lowered.adapters > 0
        return PlanKey(hidden, lowered.prompts, lowered.tokens_sharded, by_host, adapted)


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of the cache and of the buffers."""

    max_tokens: int  # tokens per step
    max_sequences: int  # sequences per step
    context_length: int  # tokens of one sequence
    num_blocks: int  # blocks of BLOCK_TOKENS positions, shared by all sequences
    key_type: str = "f16"
    value_type: str = "f16"
    state_slots: int = 0  # slots for states of sequences; 0 if no layer keeps a state
    embedding_rows: int = 0  # rows of embeddings per step
    max_outputs: int = 0  # rows of logits, or of hidden states, per step; 0: max_tokens

    @property
    def types(self) -> CacheTypes:
        """The types of keys and of values."""
        return self.key_type, self.value_type


@dataclass(frozen=True)
class StageRanks:
    """The peers of a rank in a job of several pipeline stages."""

    communicator: "Communicator"  # over the ranks of this stage
    costs: StageCosts
    previous: int  # the job's rank that sends rows to this one; -1 on the first stage
    next: int  # the job's rank that receives rows from this one; -1 on the last stage
    hidden: int  # floats per row

    @staticmethod
    def arena_bytes(count: int, ranks: int, max_tokens: int, hidden: int) -> int:
        """(count + 1) * (4 * ceil(max_tokens / ranks) * hidden + alignment); 0 if there is one stage.

        These bytes of the job's arena hold the rows in flight between `count` stages of `ranks` ranks.
        """
        return 0 if count == 1 else (count + 1) * (4 * -(-max_tokens // ranks) * hidden + _ALIGNMENT)


@dataclass(frozen=True)
class StepStats:
    """Counters of one rank. Seconds are those of its first thread."""

    total: float  # seconds in all steps
    barrier: float  # seconds waiting at the rank's own barriers
    exchange: float  # seconds in exchanges with other ranks
    decode: float  # seconds in steps without prompts
    runs: int  # steps
    moved: int  # bytes read from the shared memory of other ranks
    sent: int  # bytes sent to other hosts
    decode_runs: int  # steps without prompts
    decode_read: int  # bytes of weights and cache read in steps without prompts
    packed: int  # bytes of weights packed so far; -1 if all were packed at the start


class _Message:
    """An int32 message that carries a batch of a model: a header, then arrays."""

    def __init__(self, model: int) -> None:
        self._model = model
        self.grow(_HEADER)

    def grow(self, size: int) -> None:
        """Reallocates the message with `size` int32 items."""
        self.ints = np.zeros(size, np.int32)
        self.address = native.pointer(self.ints, "int32_t *")
        self.header = native.pointer(self.ints, "struct ckdist_run *")
        self.header.command.kind, self.header.command.model = COMMANDS["run"], self._model


class Executable:
    """Programs bound to this rank's weights, cache and threads.

    Rank 0 publishes a batch to all ranks. It runs its own part of the batch when it collects the logits; `run` does
    both. Up to `in_flight` batches may be published before the first is collected.

    There is a plan for decode, and one for prefill if that has another layout. Both use one cache, in the layout of
    decode, so a sequence may switch plans at each step. Steps with prompts of at least `prefill_from` tokens run the
    prefill plan. A plan may have a variant in which hosts share its rows out; it runs from `dispatch_from` tokens on.
    If the level has other products for prompts (`splits_roles`), they have plans of their own, and a step has either
    prompts' tokens or generated ones.

    Args:
        plans: The plans that make logits. Empty for an encoder.
        threads: Threads of a step without prompts.
        threads_batch: Threads of a step with prompts.
        worker: The rank's loop of commands and its threads. `worker.add` makes the model one that may run.
        loader: The native loader if some matrices are not packed yet.
        hidden_plans: The same plans, but they make hidden states in place of logits.
        model: Its number among the worker's models, the same on every rank.
    """

    def __init__(
        self,
        plans: Sequence[ExecutionPlan],
        spec: ModelShape,
        communicator: "Communicator",
        config: CacheConfig,
        threads: int,
        threads_batch: int,
        worker: NativeWorker,
        loader: native.CData | None = None,
        stages: StageRanks | None = None,
        hidden_plans: Sequence[ExecutionPlan] = (),
        model: int = 0,
    ):
        self.spec, self.config, self.communicator, self.stages = spec, config, communicator, stages
        self.costs = StageCosts() if stages is None else stages.costs
        self.max_tokens, self.max_sequences = config.max_tokens, config.max_sequences
        self.max_outputs = config.max_outputs or config.max_tokens
        self.num_blocks, self.state_slots = config.num_blocks, config.state_slots
        self.context_length, self.vocab_size = config.context_length, spec.vocab_size
        self.threads, self.threads_batch = threads, threads_batch
        self.single_threads = threads  # of steps of at most SINGLE_ROWS tokens; at most `threads`
        self.has_logits, self.has_hidden = bool(plans), bool(hidden_plans)
        self.has_axes = any(rope.axes for rope in spec.ropes.values())  # positions may have three axes
        first_hidden, plans = len(plans), [*plans, *hidden_plans]
        self._numbers = {PlanKey.of(plan.lowered, n >= first_hidden): n for n, plan in enumerate(plans)}
        assert len(self._numbers) == len(plans), "each kind of plan is there once"
        self.layouts = 1 + any(key.sharded for key in self._numbers)  # 1: decode and prefill have the same
        self.splits_roles = any(key.prompts for key in self._numbers)
        self.adapters = max(plan.lowered.adapters for plan in plans)  # slots for adapters of sequences
        self.dispatches = any(key.by_host for key in self._numbers)  # hosts may share rows out
        rows = [b.width for plan in plans for b in plan.lowered.buffers if b.place == "hidden"]
        self._hidden_width = max(rows, default=0)
        self.prefill_from, self.dispatch_from = 0, sys.maxsize
        self.prefill_tokens = [0] * self.layouts  # by layout, DECODE or PREFILL: tokens of all steps with prompts
        self.dispatched_tokens = 0  # tokens of all steps in which hosts shared rows out
        self._lowered = [plan.lowered for plan in plans]
        self.experts = plans[-1].lowered.experts
        stage = communicator if stages is None else stages.communicator
        self.worker, self.model = worker, model
        self._program = self._make_program(plans, loader)  # the native executable reads it while it lives
        self._handle = native.call(
            native.lib.ckdist_executable_new, self._program, communicator.handle, stage.handle, worker.pool.handle
        )
        self._messages = deque(_Message(self.model) for _ in range(self.in_flight))  # the free one first
        # each batch in flight: its number of selected rows, and whether they are hidden states
        self._published: deque[tuple[int, bool]] = deque()

    @property
    def in_flight(self) -> int:
        """How many steps may be published before the first of them is collected.

        1 for one stage, else the number of stages + 1: with one more, no stage waits for the last one to publish the
        next chunk of a prompt.
        """
        return self.costs.stages + (self.costs.stages > 1)

    @property
    def keys(self) -> list[PlanKey]:
        """The kinds of the plans, by number."""
        return list(self._numbers)

    @functools.cached_property
    def labels(self) -> list[list[tuple[str, int | None]]]:
        """By plan: the kind and the layer of each step."""
        return [lowered.labels() for lowered in self._lowered]

    def _make_program(self, plans: Sequence[ExecutionPlan], loader: native.CData | None) -> native.CData:
        """The `struct ckdist_program *` of the plans."""
        config, lowered = self.config, plans[-1].lowered
        self.caches = caches = {layer: cache for plan in plans for layer, cache in plan.lowered.caches.items()}
        count = max([*caches, *lowered.experts]) + 1
        layers = [caches[layer].fields(config.types) if layer in caches else {} for layer in range(count)]
        experts = max(lowered.experts.values(), default=0)
        self._expert_rows_shape = (count, experts)
        return native_program(
            plans,
            self.spec,
            config.max_tokens,
            config.context_length,
            max_sequences=config.max_sequences,
            max_outputs=self.max_outputs,
            context_length=config.context_length,
            hidden=self._hidden_width,
            exchange_floats=max(plan.lowered.exchange_floats for plan in plans),
            layers=layers,
            layer_count=count,
            experts=experts,
            adapters=self.adapters,
            state_slots=config.state_slots,
            blocks=config.num_blocks,
            embedding_rows=config.embedding_rows,
            embedding_width=self.spec.hidden_size,
            loader=loader,
            in_flight=self.in_flight,
            **self._neighbours(),
        )

    def _neighbours(self) -> dict[str, Any]:
        """The fields of a `struct ckdist_program` that name the neighbouring stages and the rows sent to the next."""
        if self.stages is None:
            return {"previous": -1, "next": -1}
        rows, stages = -(-self.max_tokens // self.stages.communicator.size), self.stages
        places = [self.communicator.allocate((rows, stages.hidden)) for _ in range(self.in_flight)]
        return {"previous": stages.previous, "next": stages.next, "outgoing": places}

    @property
    def failed(self) -> bool:
        """True if a step has failed. Then the other ranks have stopped as well."""
        return self.worker.failed

    def join(self) -> None:
        """Makes this a model that may run. A collective call while no step is in flight."""
        self.worker.add(self.model, self._handle)

    def run(self, batch: Batch, copies: int = 0) -> np.ndarray:
        """Rank 0: runs one step on all ranks while no other step is in flight.

        Args:
            batch: The step's tokens.
            copies: Number of a `copy_blocks` that ends before the step begins on any rank. 0: none.

        Returns:
            Float32 logits (selected, vocab) or hidden states (selected, hidden), valid until the next run.

        Raises:
            CommError: A rank died or stalled. The message names it and the step.
        """
        self.publish(batch, copies)
        return self.collect()

    def publish(self, batch: Batch, copies: int = 0) -> None:
        """Rank 0: publishes a step to all ranks. At most `in_flight` steps may be published and not collected.

        `copies`: as in `run`.
        """
        tokens = len(batch.token_ids)
        several = tokens > len(batch.chunks)
        prompts = several if batch.prompts is None else batch.prompts
        is_sharded = (prompts if self.splits_roles else several) and tokens >= self.prefill_from
        layout = PREFILL if is_sharded and self.layouts > 1 else DECODE
        self.prefill_tokens[layout] += (prompts or several) * tokens
        self._publish(batch, self._plan(batch, prompts, layout), copies=copies)

    def _plan(self, batch: Batch, prompts: bool, layout: int) -> int:
        """The number of the plan that a batch runs."""
        hidden = batch.hidden or not self.has_logits  # only prompts' rows are wanted
        adapted = batch.adapters is not None
        key = PlanKey(hidden, (prompts or hidden) and self.splits_roles, layout == PREFILL, adapted=adapted)
        by_host = key._replace(by_host=True)
        if len(batch.token_ids) >= self.dispatch_from and by_host in self._numbers:
            self.dispatched_tokens += len(batch.token_ids)
            return self._numbers[by_host]
        return self._numbers[key]

    def collect(self) -> np.ndarray:
        """Rank 0: runs its own part of the oldest published step.

        Returns:
            Float32 logits (selected, vocab) or hidden states (selected, hidden), valid until the next call.

        Raises:
            CommError: A rank died or stalled. The message names it and the step.
        """
        selected, hidden = self._collect()
        return (self._hidden if hidden else self._logits)[:selected]

    def output_rows(self) -> np.ndarray:
        """Rank 0: the last step's float32 rows (max_outputs, hidden) that its plan returns with the logits."""
        return self._hidden

    @functools.cached_property
    def _logits(self) -> np.ndarray:
        """Float32 (max_outputs, vocab), gathered from all ranks."""
        return self._rows(native.lib.ckdist_executable_logits(self._handle), self.vocab_size)

    @functools.cached_property
    def _hidden(self) -> np.ndarray:
        """Float32 (max_outputs, hidden)."""
        return self._rows(native.lib.ckdist_executable_hidden(self._handle), self._hidden_width)

    def _rows(self, address: native.CData, width: int) -> np.ndarray:
        """A view of the native float32 array (max_outputs, width) at `address`."""
        buffer = native.ffi.buffer(address, self.max_outputs * width * 4)
        return np.frombuffer(buffer, np.float32).reshape(self.max_outputs, width)

    def run_layer(self, batch: Batch, layout: int) -> None:
        """Runs a step up to the end of the first layer, to measure it. The batch's blocks hold no valid data then."""
        plan = self._plan(batch, len(batch.token_ids) > len(batch.chunks), layout)
        self._publish(batch, plan, self._lowered[plan].layer_steps)
        self._collect()

    def _publish(self, batch: Batch, plan: int, steps: int = 0, copies: int = 0) -> None:
        """Publishes a batch for a plan, or for its first `steps` steps if `steps` is not 0."""
        tokens, sequences, selected = len(batch.token_ids), len(batch.chunks), len(batch.logits_indices)
        states = () if batch.states is None else (batch.states.reshape(-1),)
        firsts = () if batch.firsts is None else (batch.firsts,)
        embeddings = () if batch.embeddings is None else (batch.embeddings.reshape(-1).view(np.int32),)
        adapters = () if batch.adapters is None else (batch.adapters.reshape(-1).view(np.int32),)
        positions = () if batch.positions is None else (batch.positions.reshape(-1),)
        arrays = (
            batch.token_ids,
            batch.chunks.reshape(-1),
            batch.block_tables,
            *states,
            *firsts,
            batch.logits_indices,
            *adapters,
            *positions,
            *embeddings,
        )
        size = _HEADER + sum(map(len, arrays))
        message = self._messages[0]
        if len(message.ints) < size:
            message.grow(2 * size)
        # One numpy call: between two steps the CPU caches hold weights, so each line of code is fetched from memory.
        header = message.header
        header.tokens, header.sequences, header.selected = tokens, sequences, selected
        header.blocks, header.plan, header.steps = len(batch.block_tables), plan, steps
        header.states, header.firsts = sequences * len(states), sequences * len(firsts)
        header.adapters = 0 if batch.adapters is None else batch.adapters.size
        header.embeddings = 0 if batch.embeddings is None else len(batch.embeddings)
        header.positions = 0 if batch.positions is None else len(batch.positions)
        header.command.copies = copies
        header.threads = self.threads_of(tokens, sequences)
        np.concatenate(arrays, out=message.ints[_HEADER:size])
        self.worker.publish(message.address, size)
        self._messages.rotate(-1)
        self._published.append((selected, batch.hidden))

    def threads_of(self, tokens: int, sequences: int) -> int:
        """The threads of a step."""
        if tokens > sequences:
            return self.threads_batch
        return self.single_threads if tokens <= SINGLE_ROWS else self.threads

    def _collect(self) -> tuple[int, bool]:
        """Runs rank 0's part of the oldest step; returns its number of selected rows and Batch.hidden."""
        self.worker.run()
        return self._published.popleft()

    def work(self) -> None:
        """Ranks other than 0: executes rank 0's commands for the models that are loaded. Returns when rank 0 stops."""
        kind, model = self.worker.work()
        if kind != "stop":
            raise NativeError(f"rank 0 sent {kind} for model {model}, which this loop does not execute")

    def check_peers(self) -> None:
        """Raises CommError if a peer is known to be dead. For the time between steps."""
        self.communicator.check_peers()

    def stop(self) -> None:
        """Rank 0: makes the other ranks return from work()."""
        self.worker.send("stop")

    def slab_bytes(self, kind: str) -> int:
        """Bytes of one entry of a kind in SLABS on this rank; 0 if the cache has nothing of the kind."""
        return native.lib.ckdist_executable_slab_bytes(self._handle, SLABS[kind])

    def set_slab(self, kind: str, headers_file: int, data_file: int, slots: int) -> None:
        """Gives this rank the files of a slab, which must stay open. All ranks have equally many slots."""
        native.call(native.lib.ckdist_executable_set_slab, self._handle, SLABS[kind], headers_file, data_file, slots)

    def copy_blocks(self, blocks: np.ndarray, into_cache: bool) -> int:
        """Rank 0: begins to copy between the cache and the slabs on every rank, while steps run.

        Published steps run first. No later step may write these blocks, or read those copied into the cache, unless it
        waits for the copy. `worker.copy_results` returns how much succeeded.

        Args:
            blocks: `struct ckdist_block_copy` (n,), at most `ckdist_copies_most`.
            into_cache: Copy from the slabs.

        Returns:
            The copy's number, for `copies` of a step.
        """
        data = blocks.view(np.int32).reshape(-1)
        message = np.zeros(_COPY_HEADER + len(data), np.int32)
        header = native.pointer(message, "struct ckdist_copy_blocks *")
        header.command.kind, header.command.model = COMMANDS["copy_blocks"], self.model
        header.into_cache, header.count = into_cache, len(blocks)
        message[_COPY_HEADER:] = data
        return self.worker.publish_copy(native.pointer(message, "int32_t *"), len(message))

    def stats(self, reset: bool = False) -> StepStats:
        """Returns this rank's counters since the start or the last `reset`."""
        out = native.struct("ckdist_step_stats")
        native.lib.ckdist_executable_stats(self._handle, out, reset)
        return StepStats(*(getattr(out, field.name) for field in fields(StepStats)))

    def expert_rows(self) -> dict[int, np.ndarray]:
        """By layer with experts: how many rows each expert has computed so far, int64 (experts,).

        Rank 0 counts the rows of all tokens.
        """
        out = np.zeros(self._expert_rows_shape, np.int64)
        if self.experts:
            native.lib.ckdist_executable_expert_rows(self._handle, native.pointer(out, "int64_t *"))
        return {layer: out[layer, :count] for layer, count in self.experts.items()}

    def reports(self) -> list[StepStats]:
        """Rank 0, between two batches: returns the counters of each rank since its last reset, in rank order.

        Raises:
            CommError: A rank died or stalled.
        """
        rows = self.worker.report(self.model)
        return [StepStats(*(row[field.name].item() for field in fields(StepStats))) for row in rows]

    def trace(self, handle: native.CData) -> None:
        """Makes each thread write its steps to the native trace `handle`, which must outlive the executable."""
        native.check(native.lib.ckdist_executable_trace(self._handle, handle))

    @property
    def kv_bytes(self) -> int:
        """Bytes of this rank's cache."""
        return native.lib.ckdist_executable_kv_bytes(self._handle)

    @property
    def kv(self) -> native.CData:
        """Address of this rank's cache."""
        return native.lib.ckdist_executable_kv(self._handle)

    def close(self) -> None:
        """Frees buffers and cache. The weights belong to the loader. The worker must not know the model any longer."""
        if self._handle is not None:
            native.lib.ckdist_executable_free(self._handle)
            self._handle = None
