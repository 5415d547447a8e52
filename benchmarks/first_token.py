"""Time from the start of a process to its first token, with weights packed before anything runs and while it runs.

`python benchmarks/first_token.py MODEL.gguf` runs `--repack off` and `threads` in turn, on one rank and on two,
with the model's file in the system's cache and, where this user may drop it, without. It prints medians, less the time
in which the process got memory from its machine (`prime`): seconds to the first token, the part of it that loading
everything took, the time until everything was packed, and the longest gap between two tokens while that went on, over
the median gap. After it: the memory of all ranks (proportional set size) and what the system still holds of the file,
over the size of the checkpoint.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
RANK_PROGRAM = "rank"


def rank_program(model_path: str, repack: str, threads: int, prompt_tokens: int, tokens: int) -> None:
    """What one rank does: greedy text of one prompt; rank 0 prints when each token came, and what memory is held in
    the end.
    """
    import numpy as np

    from ckdist.comm.world import start_world
    from ckdist.config.engine_config import EngineConfig
    from ckdist.engine.load_model import load_model
    from ckdist.engine.single import SingleSequence

    world = start_world()
    primed = prime(pathlib.Path(model_path).stat().st_size * 5 // 4 // world.size)
    model = load_model(EngineConfig(model=model_path, repack=repack, threads=threads, ctx_size=2048, parallel=1), world)
    loaded = time.monotonic()
    if world.rank == 0:
        sequence, rng = SingleSequence(model.executable), np.random.default_rng(0)
        token = int(sequence.feed(rng.integers(100, 10000, prompt_tokens), outputs="last")[0].argmax())
        times, packed = [time.monotonic()], [model.loader.filled.fraction]
        while len(times) < tokens:
            token = int(sequence.feed([token], outputs="last")[0].argmax())
            times.append(time.monotonic())
            packed.append(model.loader.filled.fraction)
        model.executable.stop()
    else:
        model.executable.work()
    model.loader.wait()
    memory = sum(world.gather(proportional_bytes()))
    filled = model.loader.filled
    kept = sum(world.gather(filled.kept))
    if world.rank == 0:
        plan = {
            "kv": model.executable.kv_bytes * world.size,
            "kept": kept,
            "bytes": filled.bytes,
            "fill": filled.seconds,
        }
        print(
            json.dumps(
                dict(
                    primed=primed,
                    loaded=loaded,
                    times=times,
                    packed=packed,
                    memory=memory,
                    cached=cached_bytes(model_path),
                    **plan,
                )
            ),
            flush=True,
        )
    world.close()


def prime(size: int) -> float:
    """Seconds in which memory was touched and given back, so that this machine has it: a virtual one may take a
    tenth of memory's speed to get what it has not used for long, and that is no part of what is compared.
    """
    import mmap

    import numpy as np

    begin = time.monotonic()
    memory = mmap.mmap(-1, size)
    np.frombuffer(memory, np.uint8)[::4096] = 1
    return time.monotonic() - begin


def proportional_bytes() -> int:
    """Of this process's memory; a page that several map counts in parts."""
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def cached_bytes(path: str) -> int:
    """Of the file that the system holds in memory."""
    done = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, text=True
    )
    return int(done.stdout) if done.returncode == 0 else -1


def run(path: str, repack: str, ranks: int, options) -> dict:
    words = [
        sys.executable,
        __file__,
        RANK_PROGRAM,
        path,
        repack,
        str(max(1, options.threads // ranks)),
        str(options.prompt),
        str(options.tokens),
    ]
    command = words if ranks == 1 else ["mpirun", "-n", str(ranks), *words]
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT
    )
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    times = found["times"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    busy = [
        gap for gap, packed in zip(gaps, found["packed"], strict=True) if packed < 1
    ]  # that began before everything was packed
    return found | {
        "first": times[0] - start - found["primed"],
        "loaded": found["loaded"] - start - found["primed"],
        "gap": statistics.median(gaps),
        "longest": max(busy, default=max(gaps)) / statistics.median(gaps),
        "busy": len(busy),
        "gaps": gaps,
    }


def drop_cache(path: str) -> None:
    os.sync()
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_cache(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cache", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of all ranks together")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are generated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print every run")
    options = parser.parse_args()
    size = pathlib.Path(options.model).stat().st_size
    print(
        "| cache | ranks | repack | first token, s | ready to run, s | all packed, s | by steps | gap, ms | "
        "longest / median | gaps meanwhile | memory / checkpoint | file in cache |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for cache in options.cache:
        for ranks in options.ranks:
            found = {"off": [], "threads": []}
            for _ in range(options.rounds):
                for way, runs in found.items():
                    (warm_cache if cache == "warm" else drop_cache)(options.model)
                    runs.append(run(options.model, way, ranks, options))
                    if options.json:
                        print(json.dumps(runs[-1]))
            for way, runs in found.items():
                of = lambda key, runs=runs: statistics.median(r[key] for r in runs)
                print(
                    f"| {cache} | {ranks} | {way} | {of('first'):.2f} | {of('loaded'):.2f} | {of('fill'):.2f} | "
                    f"{of('kept') / of('bytes') / ranks:.0%} | {1e3 * of('gap'):.1f} "
                    f"| {of('longest'):.2f} | {of('busy'):.0f} | {(of('memory') - of('kv')) / size:.2f} | "
                    f"{of('cached') / size:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK_PROGRAM]:
        rank_program(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
    else:
        main()
