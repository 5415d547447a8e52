"""Layers of published widths (those of wide_layers.py, as GGUF files) beside llama.cpp: CPU seconds of a thread for a
token of a prompt and for a generated token, in alternating turns.

    python benchmarks/wide_peers.py LLAMA_BENCH FILE.gguf … [-d 1024] [-r 3]

CPU time hardly depends on what else the machine does. A run's cost is the difference between a long and a short run, so
that loading does not count.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import time

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence

CHUNK, FEW, MANY = 256, 8, 136  # tokens of a prompt; generated tokens of a short and of a long run


def child_seconds(command: list[str]) -> float:
    """CPU seconds of a process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return usage.ru_utime + usage.ru_stime


def peer_seconds(bench: str, file: pathlib.Path, depth: int) -> tuple[float, float]:
    """llama.cpp's CPU seconds of a token of a prompt, and of a generated one after `depth` tokens."""
    base = [bench, "-m", str(file), "-t", "1", "-r", "1", "--no-warmup"]

    def seconds(prompt: int, generated: int, before: int) -> float:
        return child_seconds([*base, "-p", str(prompt), "-n", str(generated), "-d", str(before)])

    start = seconds(0, FEW, depth)
    return (seconds(2 * CHUNK, 0, 0) - seconds(CHUNK, 0, 0)) / CHUNK, (seconds(0, MANY, depth) - start) / (MANY - FEW)


def own_seconds(file: pathlib.Path, depth: int) -> tuple[float, float]:
    """The same of ckdist."""
    config = EngineConfig(
        model=str(file), threads=1, ctx_size=depth + 2 * CHUNK + MANY, parallel=1, ubatch_size=CHUNK,
        cache_type_k="f16", cache_type_v="f16",
    )  # fmt: skip
    model = load_model(config, SingleWorld())
    sequence, ids = SingleSequence(model.executable), np.arange(CHUNK, dtype=np.int32) % 256
    sequence.feed(ids, outputs="none")
    begin = time.process_time()
    sequence.feed(ids, outputs="last")
    prompt = (time.process_time() - begin) / CHUNK
    for start in range(2 * CHUNK, depth, CHUNK):
        sequence.feed(ids[: depth - start], outputs="none")
    steps = []
    for _ in range(MANY):
        begin = time.process_time()
        sequence.feed(ids[:1], outputs="last")
        steps.append(time.process_time() - begin)
    model.close()
    return prompt, statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="llama-bench of llama.cpp")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("-d", "--depth", type=int, default=1024, help="context of the generated tokens")
    parser.add_argument("-r", "--rounds", type=int, default=3)
    args = parser.parse_args()
    for file in args.files:
        pairs = [
            (own_seconds(file, args.depth), peer_seconds(args.bench, file, args.depth)) for _ in range(args.rounds)
        ]
        for i, what in enumerate(("prompt", "decode")):
            own, peer = (statistics.median(pair[side][i] for pair in pairs) for side in (0, 1))
            ratios = sorted(pair[1][i] / pair[0][i] for pair in pairs)
            print(
                f"{file.stem}, {what}: ckdist {1e3 * own:.3f} ms, llama.cpp {1e3 * peer:.3f} ms, "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
