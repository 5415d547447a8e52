"""`ckdist bench`: measures prefill and decode of a model, as rows or as a sweep."""

import dataclasses
import logging
import sys
from typing import Any

from ckdist import native
from ckdist.cli.bench_machine import measure_bounds
from ckdist.cli.bench_rows import ModelBench, measurements
from ckdist.cli.bench_sweep import sweep, sweep_measurements
from ckdist.cli.rows import write_rows
from ckdist.cli.session import model_session, packed_first
from ckdist.comm.agreement import start_ranks
from ckdist.config.bench_config import BenchConfig
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.progress import ProgressBar
from ckdist.topology import default_threads, place
from ckdist.topology.instructions import reason

log = logging.getLogger(__name__)


def gist(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of the table for people: medians, and the shares of the limit and of waiting in percent."""
    test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    test += f" @ d{row['n_depth']}" * bool(row["n_depth"]) + f" x {row['n_parallel']}" * (row["n_parallel"] > 1)
    return {
        "model": f"{row['model_type']} {gigabytes(row['model_size'])}",
        "isa": row["isa"],
        "ranks": row["ranks"],
        "layout": row["layout"],
        "threads": row["n_threads"],
        "kv": row["type_k"],
        "test": test,
        "t/s": f"{row['median_ts']:.1f} ± {row['stddev_ts']:.1f}",
        "of its bound": f"{100 * row['bound_fraction']:.0f} % {row['bound']}",
        "waiting": f"{100 * row['barrier_share']:.1f} %",
        "exchange": f"{100 * row['exchange_share']:.1f} %",
    }


def run(config: BenchConfig) -> int:
    """Measures a model. Rank 0 prints the rows. Returns 0."""
    config = dataclasses.replace(packed_first(config), parallel=max(config.parallel, *config.n_parallel))
    world = start_ranks(config)
    threads = default_threads(world, config.threads)
    bounds = measure_bounds(world, threads, place(world, threads).cpus)
    with model_session(config, world, measure=config.tune) as model:
        if model is None:
            return 0
        log.debug("%s kernels: %s", native.isa(), reason())
        count = sweep_measurements(config, model.executable) if config.sweep else measurements(config)
        with ProgressBar(count, "row", "measuring") as bar:
            bench = ModelBench(model, config, bounds, bar)
            rows = sweep(bench) if config.sweep else bench.rows()
        if config.output == "md" and world.size > 1:
            print(f"prefill: {model.prefill.reason}")
        write_rows([gist(row) for row in rows] if config.output == "md" and not config.sweep else rows, config.output)
        sys.stdout.flush()
    return 0
