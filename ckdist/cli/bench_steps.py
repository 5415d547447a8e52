"""`ckdist bench steps`: seconds of the engine's steps by their content, sampling and Python included.

`ckdist simulate --steps` and `ckdist.plan.step_cost` read the rows. There are steps of one prompt of each size, and
of prompts after a context. There are decode steps of each number of sequences after a short and a long context.
"""

import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from ckdist.cli.rows import write_rows
from ckdist.cli.session import model_session, packed_first
from ckdist.config.bench_config import BenchConfig
from ckdist.engine.engine import Engine
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import ConfigError, EngineError
from ckdist.plan.step_cost import StepTotals, halves, step_row
from ckdist.program.step_batch import BLOCK_TOKENS

LEAST_CONTEXT = 64  # tokens before the decode steps


class StepBench:
    """Measures steps of an engine that has no other user.

    Args:
        repetitions: Measurements of each step, after one warm-up.
    """

    def __init__(self, engine: Engine, repetitions: int) -> None:
        self.engine, self.repetitions = engine, repetitions
        self._rng, self._count = np.random.default_rng(0), 0

    def steps(self) -> Iterator[tuple[StepTotals, float]]:
        """Yields each measured step and its seconds."""
        engine = self.engine
        for tokens in (*halves(min(engine.scheduler.max_tokens, engine.max_positions - 1)), engine.max_positions - 1):
            list(self.prompt(tokens))
            for _ in range(self.repetitions):
                yield from self.prompt(tokens)
        for count in (*halves(engine.scheduler.max_sequences), 1):
            blocks = engine.pool.num_blocks // count - 1  # the scheduler keeps a spare block for each sequence
            most = min(blocks * BLOCK_TOKENS, engine.max_positions) - self._output(count, engine.max_positions) - 1
            for context in sorted({min(LEAST_CONTEXT, most), most}) if most > 0 else ():
                yield from self.decode(count, context)

    def prompt(self, tokens: int) -> Iterator[tuple[StepTotals, float]]:
        """Yields the steps of a prompt with one token of output."""
        self._add(tokens, 1)
        most = self.engine.scheduler.max_tokens
        for first in range(0, tokens, most):
            size = min(most, tokens - first)
            attended = size * first + size * (size + 1) // 2
            seconds = self._seconds()
            if size > 1:
                yield StepTotals(size, attended, outputs=int(first + size == tokens)), seconds

    def decode(self, count: int, context: int) -> Iterator[tuple[StepTotals, float]]:
        """Yields steps in which `count` sequences decode after `context` tokens each."""
        for _ in range(count):
            self._add(context, self._output(count, context))
        running = self.engine.scheduler.running
        while len(running) < count or any(s.length - s.computed > 1 for s in running):
            if not self.engine.has_work:
                raise EngineError(f"{count} sequences of {context} tokens did not run at once: this is a bug")
            self.engine.step()
        self.engine.step()
        for _ in range(self.repetitions):
            positions = sum(s.length for s in running)
            yield StepTotals(decodes=count, decode_context=positions, outputs=count), self._seconds()
        for id in self.engine.ids:
            self.engine.abort(id)

    def _output(self, count: int, context: int) -> int:
        """Output tokens per sequence: enough that the first still runs during the repetitions of the last."""
        return self.repetitions + 2 + count + count * context // self.engine.scheduler.max_tokens

    def _add(self, tokens: int, output: int) -> None:
        self._count += 1
        ids = self._rng.integers(0, self.engine.vocab_size, tokens)  # random: no prompts share a cached prefix
        self.engine.add(self._count, ids, SamplingParams(max_tokens=output, seed=0, ignore_eos=True))

    def _seconds(self) -> float:
        """Times the next step."""
        begin = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - begin


def run(config: BenchConfig) -> int:
    """Measures. Rank 0 prints a row for each step. Returns 0.

    Raises:
        ConfigError: The model runs several steps at once.
    """
    one_stage = dataclasses.replace(config, pipeline_parallel_size=config.pipeline_parallel_size or 1)
    with model_session(packed_first(one_stage), measure=config.tune) as model:
        if model is None:
            return 0
        if model.executable.in_flight > 1:
            raise ConfigError("bench steps times one step after the other: leave --pipeline-parallel-size out")
        engine = Engine(model.executable, Sampler(model.spec.vocab_size, model.executable.worker.pool))
        rows = [step_row(*step) for step in StepBench(engine, config.repetitions).steps()]
        write_rows(rows, config.output)
    return 0
