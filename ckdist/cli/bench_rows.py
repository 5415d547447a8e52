"""Speeds of one loaded model, as rows with llama-bench's field names.

`pp` rows feed a prompt of random tokens. `tg` rows generate one token at a time, for each of n_parallel sequences,
after n_depth tokens of context. Neither includes sampling. A warm-up precedes each row.

Fields that llama-bench does not have:
    bound, bound_fraction: The machine's limit for the step, and the fraction of it that was reached. The limit is the
        larger of (bytes of weights and cache) / bandwidth and operations / peak arithmetic.
    read_of_ranks: Bytes that rank 0 reads from other ranks' memory per step and layer.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ckdist import __version__, native
from ckdist.cli.bench_machine import Bounds
from ckdist.cli.session import longer_context
from ckdist.config.bench_config import BenchConfig
from ckdist.engine.loaded_model import Model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE
from ckdist.layouts.rough_cost import work
from ckdist.mesh import WHOLE, Mesh
from ckdist.models.decoder import main_forward
from ckdist.program.cache import block_bytes
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.program.tracer import trace
from ckdist.progress import ProgressBar
from ckdist.topology.instructions import reason
from ckdist.weights.packed_type import weight_cost


def measure(run: Callable[[], float | None], repetitions: int) -> list[float]:
    """Returns the seconds of each of `repetitions` calls, after one warm-up call.

    Args:
        run: Returns its own seconds, or None if the whole call is to be timed.
    """
    run()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        own = run()
        seconds.append(time.perf_counter() - start if own is None else own)
    return seconds


class ModelBench:
    """Measures rows of one loaded model on rank 0. The bar advances after each row, never during a measurement."""

    def __init__(self, model: Model, config: BenchConfig, bounds: Bounds, bar: ProgressBar):
        self.model, self.config, self.bounds, self.bar = model, config, bounds, bar
        self.executable = model.executable
        self.rng = np.random.default_rng(0)
        spec = model.checkpoint.spec
        program = trace(main_forward(spec), spec, SINGLE, Mesh())  # of the whole model
        weight = functools.partial(weight_cost, model.loader)
        self.work = functools.partial(work, program.instrs, Mesh(), weight, native.isa())

    def tokens(self, *shape: int) -> np.ndarray:
        """Returns random token ids, int32 of `shape`."""
        return self.rng.integers(0, self.model.spec.vocab_size, shape, dtype=np.int32)

    def check(self, count: int, flag: str) -> None:
        """Raises ConfigError, naming `flag`, if `count` tokens do not fit the context."""
        if count > self.executable.context_length:
            raise ConfigError(
                f"{flag} {count} is longer than the context of {self.executable.context_length}: "
                f"{longer_context(count, self.model.spec)}"
            )

    def at_depth(self, depth: int) -> SingleSequence:
        """Returns a sequence that holds `depth` random tokens."""
        sequence = SingleSequence(self.executable)
        sequence.feed(self.tokens(depth), outputs="none")
        return sequence

    def prompt(self, count: int, depth: int = 0) -> dict[str, Any]:
        """Measures a prompt of `count` tokens after `depth` others. Raises ConfigError if they do not fit."""
        self.check(count + depth, "--n-prompt" if not depth else "--n-prompt plus --n-depth")
        ids, sequence = self.tokens(count), self.at_depth(depth)

        def run() -> None:
            """Feeds the prompt once."""
            sequence.length = depth
            sequence.feed(ids, outputs="last")

        return self.row(run, count, 0, depth)

    def generate(self, count: int, sequences: int = 1, depth: int = 0) -> dict[str, Any]:
        """Measures `count` decode steps of `sequences` sequences after `depth` tokens each.

        Raises:
            ConfigError: The tokens do not fit the context.
        """
        self.check(count + depth, "--n-gen" if not depth else "--n-gen plus --n-depth")
        ids = self.tokens(count, sequences)
        batch = LockstepSequences(self.executable, sequences)
        batch.fill(self.tokens(depth))

        def run() -> None:
            """Runs all steps once."""
            batch.length = depth
            for _ in batch.run(ids):
                pass

        return self.row(run, 0, count, depth, sequences)

    def row(
        self, run: Callable[[], None], n_prompt: int, n_gen: int, depth: int = 0, sequences: int = 1
    ) -> dict[str, Any]:
        """Times `run` and returns its row: prefill if `n_prompt` is not 0, else decode."""
        self.executable.stats(reset=True)
        before = list(self.executable.prefill_tokens)
        seconds = measure(run, self.config.repetitions)
        self.bar.update(1)
        times = self.executable.stats()
        tokens = (n_prompt or n_gen) * sequences
        rates = [tokens / s for s in seconds]
        plan, world = self.model.plan, self.model.world
        bound, least = self.bound(n_prompt, n_gen, depth, sequences)
        return {
            "build": __version__,
            "isa": native.isa(),
            "isa_reason": reason(),
            "model_filename": str(self.model.checkpoint.path),
            "model_type": self.model.spec.family,
            "model_size": self.model.total_weight_bytes,
            "ranks": world.size,
            "layout": self.layouts(before) if n_prompt else plan.decode.name,
            "layout_choice": dataclasses.asdict(self.model.prefill),
            "n_threads": self.executable.threads_of(max(n_prompt, sequences), 0 if n_prompt else sequences),
            "n_ubatch": plan.cache.max_tokens,
            "type_k": plan.cache.key_type,
            "type_v": plan.cache.value_type,
            "n_prompt": n_prompt,
            "n_gen": n_gen,
            "n_depth": depth,
            "n_parallel": sequences,
            "avg_ns": int(statistics.mean(seconds) * 1e9),
            "stddev_ns": int(statistics.pstdev(seconds) * 1e9),
            "avg_ts": statistics.mean(rates),
            "stddev_ts": statistics.pstdev(rates),
            "median_ts": statistics.median(rates),
            "samples_ts": rates,
            "barrier_share": times.barrier / times.total,
            "exchange_share": times.exchange / times.total,
            "read_of_ranks": times.moved / times.runs / len(self.model.spec.layers),
            "bound": bound,
            "bound_fraction": least / statistics.median(seconds),
            "read_bandwidth": self.bounds.read_bandwidth,
        }

    def layouts(self, before: list[int]) -> str:
        """Names the layouts that prefilled since `executable.prefill_tokens` was `before`, joined by "+".

        Chunks of different sizes may be sharded differently.
        """
        used = [now > then for now, then in zip(self.executable.prefill_tokens, before, strict=True)]
        return "+".join(
            layout.name
            for layout, ran in zip((self.model.plan.decode, self.model.plan.prefill), used, strict=False)
            if ran
        )

    def bound(self, n_prompt: int, n_gen: int, depth: int, sequences: int) -> tuple[str, float]:
        """Returns the limit of the measured work, and the least seconds that it can take on this machine."""
        if n_prompt:
            most = self.executable.max_tokens
            chunks = -(-n_prompt // most)
            context = sum(depth + min(n_prompt, (i + 1) * most) for i in range(chunks))
            weights = chunks * self.work(min(n_prompt, most), 1).read
            operations = self.work(n_prompt, 1).operations
            return self.bounds.seconds(weights + self.kv_bytes_per_token * context, operations)
        # Each step reads the weights that its tokens need, and the cache of each sequence: the context and, on average,
        # half of the generated tokens. A stage reads its weights once for each group of sequences.
        context, steps = sequences * (depth + (n_gen + 1) / 2), self.executable.costs.groups(sequences)
        weights = steps * self.work(-(-sequences // steps), 1).read
        operations = self.work(n_gen * sequences, n_gen * sequences).operations
        return self.bounds.seconds(n_gen * (weights + self.kv_bytes_per_token * context), operations)

    @property
    def kv_bytes_per_token(self) -> float:
        """Cache bytes of one token, summed over all ranks."""
        plan = self.model.plan
        block = block_bytes(self.executable.caches.values(), plan.cache.types)
        return plan.mesh.size(WHOLE) * block / BLOCK_TOKENS  # a stage caches its own layers only

    def rows(self) -> list[dict[str, Any]]:
        """Measures each prompt length and generation length of the configuration at each depth."""
        depth = self.config.n_depth
        rows = [self.prompt(n, d) for d in depth for n in self.config.n_prompt if n]
        return rows + [
            self.generate(n, s, d) for d in depth for s in self.config.n_parallel for n in self.config.n_gen if n
        ]


def measurements(config: BenchConfig) -> int:
    """Returns the number of rows that `ModelBench.rows` measures."""
    generations = len(config.n_parallel) * sum(n > 0 for n in config.n_gen)
    return len(config.n_depth) * (sum(n > 0 for n in config.n_prompt) + generations)
