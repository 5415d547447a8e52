"""The training loop of one rank: batches, gradients summed over ranks, one update per step, checkpoints, the model.

All ranks call every function here together. A NativeExecutable computes the gradients.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckdist.comm.agreement import agree_on_start
from ckdist.comm.communicator import ARENA_BYTES, Communicator, open_communicator
from ckdist.comm.world import start_world, together
from ckdist.comm.world_protocol import World
from ckdist.errors import CommError, ConfigError
from ckdist.hub.resolve import resolve
from ckdist.layouts.rank_plan import SPINS_CROWDED, SPINS_QUOTA
from ckdist.mesh import Mesh
from ckdist.program.pool import ThreadPool
from ckdist.topology import bind_memory, default_threads, place
from ckdist.topology.arithmetic import arithmetic_rate
from ckdist.train import training_checkpoint as saved
from ckdist.train.batch import PackedBatch
from ckdist.train.batch_source import BatchSource, share_source
from ckdist.train.callback import Callback, StepFunction
from ckdist.train.checkpoint_writer import CheckpointWriter, Saved
from ckdist.train.config import TrainConfig
from ckdist.train.data.batches import FileBatches, OwnBatches, Position, validation_batches
from ckdist.train.guards import Guards, LostSteps
from ckdist.train.loss_program import LossProgram
from ckdist.train.methods import MethodStep, check_method, method_step
from ckdist.train.model import TrainedModel, open_model, open_tokenizer
from ckdist.train.model_folder import write_result
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.one_f_one_b import bubble
from ckdist.train.optimizer import Optimizer
from ckdist.train.ownership import owned_ranges
from ckdist.train.pipeline import StepSums, forward_backward
from ckdist.train.ranks import TrainingRanks, accumulated_batches, training_mesh
from ckdist.train.report import Report, StepReport
from ckdist.train.resumption import changed_settings, check_settings, settings_of
from ckdist.train.schedule import Schedule
from ckdist.train.tracker import check_report_to
from ckdist.train.training_checkpoint import Folder, TrainState
from ckdist.train.training_data import check_validation, open_data
from ckdist.train.training_memory import memory_text, rank_bytes, require
from ckdist.weights.copies import compare_samples
from ckdist.weights.model_files import model_files
from ckdist.weights.whole_comparison import MAX_READERS, WholeComparison

if TYPE_CHECKING:
    from ckdist.train.training_trace import TrainingTrace

log = logging.getLogger(__name__)

PEAK_FORMATS = {True: 1, False: 0}  # bf16 -> activation format of the products
OnStep: TypeAlias = Callable[[StepReport], None]
ShouldStop: TypeAlias = Callable[[], bool]


def train(
    config: TrainConfig,
    on_step: OnStep | None = None,
    batches: BatchSource | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
    should_stop: ShouldStop | None = None,
) -> StepReport | None:
    """Trains and writes the model to `config.output_dir`.

    Args:
        config: The settings.
        on_step: Called on every rank after every step.
        batches: batches(step, rank, size) returns this rank's PackedBatches of a step, in place of train_file. Rank 0's
            function is sent to all ranks.
        callbacks: Called on every rank after steps, after checkpoints and at the end.
        world: The ranks. Default: those that the launcher started.
        should_stop: If it returns true on any rank, training ends after the step, with a checkpoint.

    Returns:
        The last step's report, or None if no step was left.

    Raises:
        ConfigError, ModelFileError, ...: A fault that the user can mend.
        CommError: A rank is lost.
    """
    ranks = start_world(config.encrypt) if world is None else world
    trainer = Trainer(config, ranks, share_source(ranks, batches, config.zero_stage))
    try:
        if on_step is not None:
            callbacks = (*callbacks, StepFunction(on_step))
        last = trainer.run(callbacks, should_stop)
    except BaseException as error:
        trainer.fail(error)
        raise
    trainer.close()
    if world is None:
        ranks.close()
    return last


def native_executable(
    model: TrainedModel, config: TrainConfig, program: LossProgram, ranks: TrainingRanks, pool: ThreadPool
) -> NativeExecutable:
    """Makes the native executable."""
    stored = model.stored(program.shards, program.lowered.stored, pool.threads)
    shards = program.trained_shards
    owned = owned_ranges(config.optim, shards.shapes, ranks.data.size, shards) if ranks.data else ()
    return NativeExecutable(program, model.load, pool, ranks, stored, owned)


class Trainer:
    """One rank of a training. `state` is its progress. The constructor is a collective call with the errors of
    `train`.
    """

    def __init__(self, config: TrainConfig, world: World, source: BatchSource | None) -> None:
        check_report_to(config.report_to)
        self.config, self.world = config, world
        self.output = Path(config.output_dir)
        self.folder: Folder | None = None  # on rank 0
        self.report: Report | None = None  # on rank 0
        self.callbacks: Sequence[Callback] = ()
        self.trace: TrainingTrace | None = None
        self.writing = 0.0  # ranks that were writing a checkpoint in the last step
        self.communicator: Communicator | None = None
        self.preference: MethodStep | None = None
        try:
            self._open(source)
        except BaseException as error:
            self.fail(error)
            raise

    def _enter_place(self) -> None:
        """Chooses the threads, and binds later allocations to the rank's memory nodes, as in serving."""
        self.threads = default_threads(self.world, self.config.threads)
        self.placement = place(self.world, self.threads)
        self.placement.enter()
        bind_memory(self.placement)
        if self.world.local_rank == 0 and self.placement.is_over_quota:
            log.warning("%s", self.placement.note)

    def _open_tokenizer(self) -> None:
        """Opens the tokenizer. Trains one if the configuration names none. A collective call."""
        made = open_tokenizer(self.config, self.model, make=True) if self.world.local_rank == 0 else None
        self.world.gather(None)  # its files exist now
        self.tokenizer = made or open_tokenizer(self.config, self.model, make=False)

    def _open_communicator(self, needed: dict[str, int]) -> Communicator:
        """Opens the communicator of all ranks. `needed`: bytes by content."""
        return open_communicator(
            self.world,
            self.config.transport,
            timeout=self.config.ddp_timeout,
            spins=None if self.placement.quota is None else SPINS_QUOTA,
            # Peers reduce gradients and read rows in the arena.
            arena_bytes=ARENA_BYTES + 2 * needed["gradients"] + 2 * needed["rows for other stages"],
            log=log.warning,
        )

    def _open(self, source: BatchSource | None) -> None:
        config, world = self.config, self.world
        agree_on_start(world, config)
        mesh = training_mesh(config, world.size, world.rank)
        self.folder = Folder(self.output) if world.rank == 0 else None
        resumed = world.broadcast(str(self.folder.choose(config.resume) or "") if self.folder is not None else None)
        base = resolve(config.model_name_or_path or None, world) or ""
        self.model = open_model(replace(config, model_name_or_path=base))
        check_method(config, self.model)
        if self.model.checkpoint is not None and world.rank == 0:
            self.model.checkpoint.warn(log)
        self._open_tokenizer()
        self._enter_place()
        # Batches of a step. A user's source may return more than the configuration says.
        steady = 2 * mesh.size("pp") if source is not None else 1
        program = self.model.lowered(config, mesh, max(accumulated_batches(config, mesh), steady))
        self.stage = program.stage
        needed = self._needed_memory(program)
        if world.size > 1:
            self.communicator = self._open_communicator(needed)
        self.ranks = TrainingRanks.split(mesh, self.communicator)
        self.pool = ThreadPool(self.threads, self.placement.cpus, SPINS_CROWDED if self.placement.crowded else None)
        self.executable = self._loaded(program)
        self.shards = program.trained_shards
        self.optimizer = Optimizer(
            config, self.executable.parameters, self.executable.gradients, self.ranks, self.pool,
            self.shards, self.executable.gradient_share,
        )  # fmt: skip
        self.writer = CheckpointWriter(
            config, world, self.ranks, self.folder, self.model, self.tokenizer, self.shards, self.optimizer
        )
        data = open_data(config, world, mesh, self.tokenizer, self.model.tokenizer_folder, source)
        self.batches, self.validation = data.batches, data.validation
        self.state = TrainState(seed=config.seed, data=data.digest)
        self.guards = Guards(config)
        update = lambda tokens: self.optimizer.step(
            self.schedule.rate(self.state.step), tokens, self.guards.most_norm(self.state)
        )
        self.preference = method_step(config, self.executable, self.ranks, self.model, self.tokenizer, update)
        if self.preference is not None:
            self.preference.measure_reference(*data.rows)  # with the weights before training
        check_validation(config, self.validation)
        self._resume(Path(resumed) if resumed else None)
        self.schedule = Schedule(config, self.state.steps)
        self.lost = LostSteps(config.learning_rate, self.state.skipped_steps)
        self.peak = self.ranks.sum(arithmetic_rate(self.threads, self.placement.cpus, PEAK_FORMATS[config.bf16]))[0]
        self._log_memory(mesh, needed)
        if config.trace:
            from ckdist.train.training_trace import TrainingTrace

            self.trace = TrainingTrace(config.trace, world, self.executable)
        if world.rank == 0:
            self.report = Report(self.output, self.state.step, self.state.steps, config.as_dict())

    def _loaded(self, program: LossProgram) -> NativeExecutable:
        """Makes the executable while other threads compare the base model's files over hosts. A collective call.

        Raises ModelFileError if the files differ.
        """
        checkpoint = self.model.checkpoint
        files = together(self.world, lambda: model_files(checkpoint)) if checkpoint and self.world.size > 1 else []
        compare_samples(self.world, files)
        comparison = WholeComparison(self.world, files, {}, min(self.threads, MAX_READERS))
        executable = native_executable(self.model, self.config, program, self.ranks, self.pool)
        comparison.finish()
        return executable

    def _needed_memory(self, program: LossProgram) -> dict[str, int]:
        """Bytes of this rank, by content. Raises CapacityError if they are not free."""
        needed = rank_bytes(self.config.optim, program, self.threads)
        remedy = "use a smaller batch, lora_r, weights_dtype bfloat16, or a larger zero_stage or tensor_parallel_size"
        require(needed, self.world.local_size, remedy)
        return needed

    def _log_memory(self, mesh: Mesh, needed: dict[str, int]) -> None:
        """Logs the mesh and the memory of each stage on rank 0. A collective call."""
        alone, over = self.stage.count == 1, f"training over {mesh}"
        lines = self.world.gather(f"{over if alone else self.stage}: {memory_text(needed)}")
        if self.world.rank == 0:
            for line in (*(() if alone else (over,)), *(lines[first.rank] for first in mesh.along("pp"))):
                log.info("%s", line)

    # Resuming

    def _resume(self, folder: Path | None) -> None:
        """Loads a checkpoint, or begins. Afterwards all ranks have the same weights and state."""
        c, begun = self.config, self.state
        if folder is not None:
            values = self.world.broadcast(vars(saved.verify(folder)) if self.world.rank == 0 else None)
            self.state = TrainState(**values)
            if self.state.data != begun.data:
                raise ConfigError(
                    f"{folder} was trained on other text: give the same train_file and tokenizer, or another output_dir"
                )
            check_settings(c, self.state, folder)
            self.writer.load(folder, self.state.updates)
        elif self.ranks.data is not None and c.zero_stage < 3:
            self.ranks.data.broadcast(self.executable.parameters.flat)
        self.batches.position = Position(self.state.epoch, self.state.row)
        before = self.state
        rows = self.batches.rows_of_step if isinstance(self.batches, FileBatches) else 0
        planned = f"{c.max_steps} {c.num_train_epochs}"
        if (rows, planned) != (self.state.rows_of_step, self.state.planned):
            steps = c.max_steps
            if steps < 0 and isinstance(self.batches, FileBatches):
                steps = self.state.step + self.batches.steps_left(c.num_train_epochs)
            self.state = replace(self.state, steps=steps, rows_of_step=rows, planned=planned)
        self.state = replace(self.state, settings=settings_of(c))
        if folder is not None and self.world.rank == 0:
            if changed := changed_settings(c, before, self.state):
                log.warning("%s %s", folder, changed)
            log.info("resuming from %s: %d of %d steps are done", folder, self.state.step, self.state.steps)

    def _span(self, name: str) -> AbstractContextManager[None]:
        """Writes an event of the trace, if there is one, around the `with` block."""
        return self.trace.span(name) if self.trace is not None else nullcontext()

    def _say(self, text: str) -> None:
        if self.report is not None:
            self.report.say(text)

    def _report_saved(self, done: Saved | None) -> None:
        """Reports a complete checkpoint."""
        if done is not None:
            self._say(f"saved {done.path} in {done.seconds:.1f} s; training paused for {done.paused:.2f} s")
            for callback in self.callbacks:
                callback.on_checkpoint(done.path, done.step)

    # The loop

    def run(self, callbacks: Sequence[Callback], should_stop: ShouldStop | None) -> StepReport | None:
        """Trains to the end, or until `should_stop`. Returns the last step's report. Raises the errors of `train`."""
        self.callbacks = callbacks
        c, last, stop, unsaved = self.config, None, False, False
        while self.state.step < self.state.steps and not stop and not self._is_past_best():
            last, stop = self._step(should_stop)
            step, unsaved = last.step, True
            at_end = step == self.state.steps
            if self.validation is not None and (at_end or (c.eval_steps and step % c.eval_steps == 0)):
                last = replace(last, eval_loss=self.evaluate())
                self._compare(last.eval_loss)
                self._show_samples()
            if self.report is not None:
                self.report.show(last)
                if step % c.logging_steps == 0 or at_end or last.skipped or last.eval_loss is not None:
                    self.report.write(last)
            for callback in callbacks:
                callback.on_step(last)
            self.lost.add(last, self.state.updates)
            if self.guards.goes_back(last):
                self._go_back()
            if not self.writing:
                self._report_saved(self.writer.wait())
            if c.save_steps and step % c.save_steps == 0:
                with self._span("save"):
                    self._report_saved(self.writer.save(self.state))
                unsaved = False
        if unsaved:
            self._report_saved(self.writer.save(self.state))
        self._report_saved(self.writer.wait())
        if self.state.step >= self.state.steps or self._is_past_best():
            if c.early_stopping and self.state.best_step:
                best, at = self.state.best_loss, self.state.best_step
                self._say(f"the best validation loss is {best} at step {at}; the model is that of this step")
            else:  # also if no validation loss was finite
                self._write_model()
        for callback in callbacks:
            callback.on_end(last)
        if self.trace is not None:
            self.trace.save()
        self.world.gather(None)  # all ranks leave together
        return last

    def _show_samples(self) -> None:
        """Continues some held-out prompts on the first replica, or on all if they share weights, and prints them."""
        takes_part = self.ranks.mesh.index("dp") == 0 or self.executable.gathers
        if self.config.samples and self.validation is not None and takes_part:
            from ckdist.train.samples import continued

            for line in continued(self.executable, self.validation, self.tokenizer, self.config):
                self._say(f"step {self.state.step} sample: {line}")

    def _is_past_best(self) -> bool:
        return 0 < self.config.early_stopping <= self.state.not_better

    def _compare(self, loss: float | None) -> None:
        """With `early_stopping`, writes the model if no validation loss was smaller. A collective call."""
        s = self.state
        if not self.config.early_stopping or loss is None:
            return
        if math.isfinite(loss) and (not s.best_step or loss < s.best_loss):
            self.state = replace(s, best_loss=loss, best_step=s.step, not_better=0)
            self._write_model()
        else:
            self.state = replace(s, not_better=s.not_better + 1)

    def _go_back(self) -> None:
        """Loads the weights and the optimizer's state of the last checkpoint. The data goes on. A collective call."""
        self._report_saved(self.writer.wait())
        old = self.writer.load_last(self.state.step)
        if old is None:
            self._say("there is no checkpoint to go back to yet: the step is only skipped")
            return
        self.state = replace(self.state, updates=old.updates, loss_mean=old.loss_mean, norm_mean=old.norm_mean)
        self._say(f"step {self.state.step}: the weights are those of step {old.step} again")

    def _step(self, should_stop: ShouldStop | None) -> tuple[StepReport, bool]:
        """Makes one step. Returns its report, and whether any rank wants to stop after it."""
        began = time.perf_counter()
        with self._span("data"):
            batches = self.batches.take() if self.preference is None else self.preference.take(self.batches)
        counted_here = batches if self.ranks.counts_tokens else ()
        tokens = sum(int((batch.targets >= 0).sum()) for batch in counted_here)
        every = sum(batch.tokens_to_learn_from() for batch in counted_here)
        computing = time.perf_counter()
        with self._span("run"):
            own = self._forward_backward(batches)
        counted = tokens if own.units is None else own.units
        sums = own.loss, own.balance, counted, tokens, every, *self._flags(should_stop)
        loss, balance, counted, tokens, every, stops, self.writing = self.ranks.sum_replicas(*sums)
        waiting = self._bubble(time.perf_counter() - computing, own.busy, len(batches))
        rate = self.schedule.rate(self.state.step)
        before, mean = self.state, loss / max(counted, 1)
        most_norm = self.guards.most_norm(before, mean)
        with self._span("update"):
            result = self.optimizer.step(rate, counted if math.isfinite(loss) else 0, most_norm)
        self._advance(int(tokens), result.skipped)
        seconds = time.perf_counter() - began
        gflops, peak = self.model.operations(every, tokens) / seconds / 1e9, self.peak / 1e9
        report = StepReport(
            self.state.step, self.state.steps, self._epoch(), mean, rate, result.grad_norm,
            result.skipped, int(tokens), int(every), seconds, every / seconds, tokens / seconds, gflops,
            peak, gflops / peak if gflops <= peak and peak else 0.0,
            aux_loss=balance / max(tokens, 1) if self.model.spec.balance_coefficient else None,
            metrics=own.metrics,
            spike=self.guards.spike(before, mean, result.grad_norm),
            **waiting,
        )  # fmt: skip
        self.state = self.guards.counted(self.state, report)
        return report, bool(stops)

    def _forward_backward(self, batches: Sequence[PackedBatch]) -> StepSums:
        """Computes the losses and gradients of one step. A collective call."""
        if self.preference is not None and isinstance(self.batches, FileBatches):
            return self.preference.forward_backward(batches, self.batches.rows)
        return forward_backward(self.executable, self.stage, batches)

    def _bubble(self, seconds: float, busy: float, batches: int) -> dict[str, float]:
        """The report's bubble fields of a step of `seconds`, in which this rank computed for `busy`. A
        collective call.
        """
        if self.stage.count == 1:
            return {}
        idle = self.world.size * seconds / self.ranks.sum(busy)[0] - 1
        return {"bubble": idle, "bubble_formula": bubble(self.stage.count, len(self.stage.chunks), batches)}

    def _flags(self, should_stop: ShouldStop | None) -> list[float]:
        """The numbers of ranks of this replica that want to stop, and that write a checkpoint. A collective call."""
        own = np.array([bool(should_stop and should_stop()), self.writer.is_writing], np.float32)
        return (self.ranks.replica.all_reduce(own) if self.ranks.replica is not None else own).tolist()

    def _advance(self, tokens: int, skipped: bool) -> None:
        s, at = self.state, self.batches.position
        self.state = replace(
            s,
            step=s.step + 1,
            updates=self.optimizer.steps,
            skipped_steps=s.skipped_steps + skipped,
            tokens=s.tokens + tokens,
            epoch=at.epoch,
            row=at.row,
        )

    def _epoch(self) -> float:
        """The number of completed epochs, with the fraction of the present one."""
        if isinstance(self.batches, OwnBatches):
            return 0.0
        at = self.batches.position
        return at.epoch + at.row / max(1, self.batches.rows.count(at.epoch))

    def evaluate(self) -> float:
        """The mean loss over the held-out tokens."""
        loss, tokens = 0.0, 0
        assert self.validation is not None  # otherwise it is not called
        mesh, per_device = self.ranks.mesh, self.config.per_device_train_batch_size
        batches = validation_batches(self.validation, mesh.index("dp"), mesh.size("dp"), per_device)
        if self.preference is not None:
            return self.preference.loss(list(batches), self.validation)
        for batch in batches:
            loss += self.executable.loss(batch)
            tokens += int((batch.targets >= 0).sum()) if self.ranks.counts_tokens else 0
        self.executable.flush()
        loss, tokens = self.ranks.sum_replicas(loss, tokens)
        return loss / max(tokens, 1)

    def _write_model(self) -> None:
        """Writes the finished model, or its adapter, on rank 0."""
        weights = self.writer.gathered()
        if self.world.rank == 0 and weights is not None:
            out = write_result(self.output, self.model, weights, self.tokenizer, self.config)
            skipped = self.state.skipped_steps
            self._say(f"the {out.stem} is in {out}" + (f"; {skipped} steps were skipped" if skipped else ""))

    def fail(self, error: BaseException) -> None:
        """Releases everything after `error`, and sends it to the other ranks: they must not wait for this one."""
        communicator, self.communicator = self.communicator, None
        if self.trace is not None:
            self.trace.save_own()
        if communicator is not None and not isinstance(error, CommError):
            communicator.abandon(str(error) or type(error).__name__)
        self.close()

    def close(self) -> None:
        """Closes the report, the folder, the sampling engine and the communicator."""
        for own in (self.report, self.folder, self.preference):
            if own is not None:
                own.close()
        if self.communicator is not None:
            self.communicator.close()
