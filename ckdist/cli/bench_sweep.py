"""`ckdist bench --sweep`: speed over a growing context, or over the number of threads.

The context table has the columns of llama.cpp's sweep-bench, so that the same tools can read it. The thread table picks
the fewest threads that keep MOST_DECODE of the best decode speed and MOST_PREFILL of the best prefill speed.
"""

from collections.abc import Sequence
from typing import Any

from ckdist.cli.bench_rows import ModelBench
from ckdist.config.bench_config import BenchConfig
from ckdist.program.executable import Executable

GENERATED_PART = 4  # the context sweep generates a fourth of its prompt's tokens, as sweep-bench does
MOST_DECODE, MOST_PREFILL = 0.90, 0.85  # shares of the best speed


def sweep_measurements(config: BenchConfig, executable: Executable) -> int:
    """Returns the number of measurements of the sweep."""
    if config.sweep == "threads":
        return 2 * _most_threads(executable)
    return 2 * (executable.context_length // _chunk(executable))


def sweep(bench: ModelBench) -> list[dict[str, Any]]:
    """Runs the sweep that `--sweep` names. Raises ConfigError if a length does not fit the context."""
    return thread_sweep(bench) if bench.config.sweep == "threads" else context_sweep(bench)


def context_sweep(bench: ModelBench) -> list[dict[str, Any]]:
    """Measures PP prompt tokens and TG generated tokens after N_KV tokens of context, in seconds and tokens/s."""
    chunk = _chunk(bench.executable)
    generated = max(1, chunk // GENERATED_PART)
    rows = []
    for depth in range(0, bench.executable.context_length - chunk + 1, chunk):
        seconds = [row["avg_ns"] * 1e-9 for row in (bench.prompt(chunk, depth), bench.generate(generated, depth=depth))]
        row = {"PP": chunk, "TG": generated, "N_KV": depth}
        row |= {"T_PP s": seconds[0], "S_PP t/s": chunk / seconds[0]}
        rows.append(row | {"T_TG s": seconds[1], "S_TG t/s": generated / seconds[1]})
    return rows


def thread_sweep(bench: ModelBench) -> list[dict[str, Any]]:
    """Measures prefill and decode with 1 to all threads. `picked` marks the choice of `fewest_threads`."""
    config, executable = bench.config, bench.executable
    (prompt,), (generated,), (depth,), (sequences,) = config.n_prompt, config.n_gen, config.n_depth, config.n_parallel
    rows = []
    for threads in range(1, _most_threads(executable) + 1):
        executable.threads = executable.threads_batch = executable.single_threads = threads
        row = {"n_threads": threads, "n_prompt": prompt, "n_gen": generated, "n_depth": depth, "n_parallel": sequences}
        row["pp t/s"] = bench.prompt(prompt, depth)["median_ts"]
        rows.append(row | {"tg t/s": bench.generate(generated, sequences, depth)["median_ts"]})
    prefill, decode = ([row[name] for row in rows] for name in ("pp t/s", "tg t/s"))
    picked = fewest_threads(prefill, decode)
    return [
        row
        | {"pp of best": row["pp t/s"] / max(prefill), "tg of best": row["tg t/s"] / max(decode)}
        | {"picked": "*" if i == picked else ""}
        for i, row in enumerate(rows)
    ]


def fewest_threads(prefill: Sequence[float], decode: Sequence[float]) -> int:
    """Returns the index of the first thread count that is fast enough at both prefill and decode.

    If there is none, returns the index of the best decode speed.

    Args:
        prefill: Tokens/s by thread count, ascending counts.
        decode: Tokens/s of decode, by the same counts.
    """
    enough = (
        i
        for i, (p, d) in enumerate(zip(prefill, decode, strict=True))
        if d >= MOST_DECODE * max(decode) and p >= MOST_PREFILL * max(prefill)
    )
    return next(enough, decode.index(max(decode)))


def _chunk(executable: Executable) -> int:
    """Prompt tokens of each row of the context sweep: one full step, or a shorter context."""
    return min(executable.max_tokens, executable.context_length)


def _most_threads(executable: Executable) -> int:
    return max(executable.threads, executable.threads_batch)
