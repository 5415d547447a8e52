"""`ckdist bench`: prefill and decode speed of a model, in rows with llama-bench's field names, or the machine's own limits.

As in llama-bench, `pp` rows feed a prompt of random tokens, `tg` rows generate one token at a time from an empty context;
sampling is not part of either. A warm-up precedes every row.
"""

import csv
import io
import json
import statistics
import sys
import time

import numpy as np

from ckdist import __version__, native
from ckdist.cli import bench_comm
from ckdist.cli.node_speed import read_bandwidth
from ckdist.cli.session import longer_context, model_session
from ckdist.comm.world import start_world
from ckdist.config import BenchConfig
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.program.batch import BLOCK_TOKENS
from ckdist.program.executable import kv_bytes_per_block
from ckdist.topology import default_threads, place

def host_bandwidth(world, threads: int, cpus) -> float:
    """The same over all ranks at once; a collective call."""
    world.gather(None)  # start together
    return sum(world.gather(read_bandwidth(threads, cpus)))


def machine(config: BenchConfig) -> int:
    """`ckdist bench machine`."""
    world = start_world()
    threads = config.threads or default_threads(world)
    cpus = place(world, threads).cpus
    one = read_bandwidth(1, cpus[:1]) if world.rank == 0 else 0.0
    every = host_bandwidth(world, threads, cpus)
    if world.rank == 0:
        row = {"isa": native.ffi.string(native.lib.ckdist_isa()).decode(), "ranks": world.size, "n_threads": threads, "read_bandwidth_1": one, "read_bandwidth": every}
        write_rows([row], config.output)
    world.close()
    return 0


def measure(run, repetitions: int) -> list[float]:
    """Seconds of each of `repetitions` calls, after one that does not count."""
    run()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def write_rows(rows: list[dict], output: str) -> None:
    """Rows on standard output as json, csv or a Markdown table."""
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    shown = [{k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items() if not isinstance(v, (list, dict))} for row in rows]
    names = list(shown[0]) if shown else []
    if output == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(shown)
        print(text.getvalue(), end="")
        return
    widths = {n: max(len(n), *(len(row[n]) for row in shown)) for n in names}
    for cells in ({n: n for n in names}, {n: "-" * widths[n] for n in names}, *shown):
        print("| " + " | ".join(cells[n].ljust(widths[n]) for n in names) + " |")


class ModelBench:
    """Rows for one loaded model on rank 0."""

    def __init__(self, model, config: BenchConfig, bandwidth: float):
        self.model, self.config, self.bandwidth = model, config, bandwidth
        self.executable = model.executable
        self.rng = np.random.default_rng(0)
        self.weight_bytes = model.total_weight_bytes

    def tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.model.spec.vocab_size, count, dtype=np.int32)

    def check(self, count: int, flag: str) -> None:
        if count > self.executable.context_length:
            raise ConfigError(f"{flag} {count} is longer than the context of {self.executable.context_length}: {longer_context(count, self.model.spec)}")

    def prompt(self, count: int) -> dict:
        self.check(count, "--n-prompt")
        ids = self.tokens(count)
        return self.row(lambda: SingleSequence(self.executable).feed(ids, outputs="last"), count, 0)

    def generate(self, count: int) -> dict:
        self.check(count, "--n-gen")
        ids = self.tokens(count)

        def run():
            sequence = SingleSequence(self.executable)
            for i in range(count):
                sequence.feed(ids[i : i + 1], outputs="last")

        return self.row(run, 0, count)

    def row(self, run, n_prompt: int, n_gen: int) -> dict:
        self.executable.times(reset=True)
        seconds = measure(run, self.config.repetitions)
        times = self.executable.times()
        rates = [(n_prompt or n_gen) / s for s in seconds]
        plan, world = self.model.plan, self.model.world
        result = {
            "build": __version__,
            "isa": native.ffi.string(native.lib.ckdist_isa()).decode(),
            "model_filename": str(self.model.checkpoint.path),
            "model_type": self.model.spec.architecture,
            "model_size": self.weight_bytes,
            "ranks": world.size,
            "layout": (plan.prefill if n_prompt else plan.decode).name,
            "n_threads": plan.threads_batch if n_prompt else plan.threads,
            "n_ubatch": plan.limits.max_tokens,
            "type_k": plan.limits.kv_type,
            "type_v": plan.limits.kv_type,
            "n_prompt": n_prompt,
            "n_gen": n_gen,
            "avg_ns": int(statistics.mean(seconds) * 1e9),
            "stddev_ns": int(statistics.pstdev(seconds) * 1e9),
            "avg_ts": statistics.mean(rates),
            "stddev_ts": statistics.pstdev(rates),
            "median_ts": statistics.median(rates),
            "samples_ts": rates,
            "barrier_share": times.barrier / times.total,
            "exchange_share": times.exchange / times.total,
            "read_bandwidth": self.bandwidth,
        }
        if n_gen:
            # Every generated token reads all weights and, on average, half of the final cache.
            moved = self.weight_bytes + self.kv_bytes_per_token * n_gen / 2
            result["bytes_per_s"] = moved * result["median_ts"]
            result["bandwidth_fraction"] = result["bytes_per_s"] / self.bandwidth
        return result

    @property
    def kv_bytes_per_token(self) -> float:
        plan = self.model.plan
        return self.model.world.size * kv_bytes_per_block(self.model.spec, plan.decode, plan.mesh, plan.limits.kv_type) / BLOCK_TOKENS


def run(config: BenchConfig) -> int:
    if config.target == "machine":
        return machine(config)
    if config.target == "comm":
        return bench_comm.run(config)
    world = start_world()
    threads = config.threads or default_threads(world)
    bandwidth = host_bandwidth(world, threads, place(world, threads).cpus)
    with model_session(config, world) as model:
        if model is None:
            return 0
        bench = ModelBench(model, config, bandwidth)
        rows = [bench.prompt(n) for n in config.n_prompt if n] + [bench.generate(n) for n in config.n_gen if n]
        write_rows(rows, config.output)
        sys.stdout.flush()
    return 0
