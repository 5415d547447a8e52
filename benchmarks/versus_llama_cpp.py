"""ckdist beside llama.cpp on the same GGUF file with the same threads: alternating runs, medians, ratios.

    python benchmarks/versus_llama_cpp.py -m MODEL.gguf [-t 2] [-p 512] [-n 128] [-r 5] [-o table|json]

Needs the `peers` extra (llama-cpp-python). Three contestants take turns: llama.cpp and ckdist with `-t` threads in one process,
and ckdist with one rank per thread under mpirun. Every turn is a process of its own; a turn's row is its median.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent


def llama_turn(model: str, threads: int, n_prompt: int, n_gen: int, repetitions: int) -> dict[str, float]:
    """Medians of tokens/s of prefill and decode by llama.cpp, in this process."""
    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    handle = ll.llama_model_load_from_file(model.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = max(n_prompt, n_gen) + 16, 2048, 512
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_init_from_model(handle, params)
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(handle))

    def feed(count: int) -> None:
        tokens = (ctypes.c_int32 * count)(*[(i * 7919 + 13) % vocab for i in range(count)])
        if ll.llama_decode(context, ll.llama_batch_get_one(tokens, count)):
            raise SystemExit("llama.cpp could not decode")

    def timed(calls: int, count: int) -> float:
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        start = time.perf_counter()
        for _ in range(calls):
            feed(count)
        return calls * count / (time.perf_counter() - start)

    feed(1)
    result = {}
    if n_prompt:
        timed(1, n_prompt)
        result["prefill"] = statistics.median(timed(1, n_prompt) for _ in range(repetitions))
    if n_gen:
        timed(8, 1)
        result["decode"] = statistics.median(timed(n_gen, 1) for _ in range(repetitions))
    return result


def ckdist_turn(model: str, ranks: int, threads: int, n_prompt: int, n_gen: int, repetitions: int) -> dict[str, float]:
    """The same by ckdist, in `ranks` processes of `threads` threads."""
    flags = ["-m", model, "-t", str(threads), "-p", str(n_prompt), "-n", str(n_gen), "-r", str(repetitions), "-o", "json"]
    command = [sys.executable, "-m", "ckdist.cli.main", "bench", *flags]
    if ranks > 1:
        command = [shutil.which("mpirun") or "mpirun", "-n", str(ranks), *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(done.stderr)
    rows = json.loads(done.stdout)
    result = {"prefill" if row["n_prompt"] else "decode": row["median_ts"] for row in rows}
    result["bandwidth_fraction"] = next((row["bandwidth_fraction"] for row in rows if row["n_gen"]), 0.0)
    result["exchange_share"] = max(row["exchange_share"] for row in rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--repetitions", type=int, default=2, help="measurements within a turn")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--llama-turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.llama_turn:
        with contextlib.redirect_stdout(sys.stderr):
            result = llama_turn(args.model, args.threads, args.n_prompt, args.n_gen, args.repetitions)
        print(json.dumps(result))
        return

    one, many = f"ckdist 1x{args.threads}", f"ckdist {args.threads}x1"
    turns: dict[str, list[dict]] = {"llama.cpp": [], one: [], many: []}
    for _ in range(args.rounds):
        peer = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--llama-turn"], capture_output=True, text=True, check=True)
        turns["llama.cpp"].append(json.loads(peer.stdout.splitlines()[-1]))
        turns[one].append(ckdist_turn(args.model, 1, args.threads, args.n_prompt, args.n_gen, args.repetitions))
        turns[many].append(ckdist_turn(args.model, args.threads, 1, args.n_prompt, args.n_gen, args.repetitions))
    medians = {name: {k: statistics.median(t[k] for t in rows) for k in rows[0]} for name, rows in turns.items()}
    if args.output == "json":
        print(json.dumps({"model": args.model, "threads": args.threads, "medians": medians, "turns": turns}, indent=1))
        return
    print(f"{pathlib.Path(args.model).name}, {args.threads} threads in all, medians of {args.rounds} alternating turns (ckdist RANKSxTHREADS)")
    for phase in ("prefill", "decode"):
        base = medians["llama.cpp"].get(phase)
        if base is None:
            continue
        cells = [f"{name} {medians[name][phase]:.1f} tok/s ({medians[name][phase] / base:.2f}x)" for name in turns]
        print(f"  {phase:8s} " + "   ".join(cells) + f"   {many} / {one} {medians[many][phase] / medians[one][phase]:.2f}")
    print(f"  decode reads {medians[one]['bandwidth_fraction']:.0%} of the measured read bandwidth; exchange takes {medians[many]['exchange_share']:.1%} of a step of {many}")


if __name__ == "__main__":
    main()
