"""ckdist beside llama.cpp on the same GGUF file with the same threads: alternating runs, medians, ratios.

    python benchmarks/versus_llama_cpp.py -m MODEL.gguf [-t 2] [-p 512] [-n 128] [-npl 1] [-d 0] [-r 5] [-o table|json] [--plot roofline.png]

Needs the `peers` extra (llama-cpp-python, matplotlib). The contestants take turns: llama.cpp with and without its repacking of weights,
ckdist with `-t` threads in one process, and ckdist with one rank per thread under mpirun. Every turn is a process of its own; a
turn's row is its median. Ratios are to llama.cpp's better setting, row by row.
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


class LlamaCpp:
    """llama.cpp in this process: a context for `sequences` sequences of `length` tokens."""

    def __init__(self, model: str, threads: int, length: int, sequences: int, repack: bool):
        import llama_cpp as ll

        self.ll = ll
        self.quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self.quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        settings = ll.llama_model_default_params()
        settings.use_extra_bufts = repack
        self.model = ll.llama_model_load_from_file(model.encode(), settings)
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = (length + 16) * sequences, 2048, 512
        params.n_seq_max = sequences
        params.kv_unified = False
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(2048, 0, sequences)

    def clear(self) -> None:
        self.ll.llama_memory_clear(self.ll.llama_get_memory(self.context), True)

    def forget(self, depth: int, sequences: int) -> None:
        """Shortens every sequence to `depth` tokens."""
        for s in range(sequences):
            self.ll.llama_memory_seq_rm(self.ll.llama_get_memory(self.context), s, depth, -1)

    def feed(self, count: int, position: int, sequences: range) -> None:
        """`count` tokens for each of `sequences`, from `position` on; logits of the last of each."""
        for begin in range(0, count, 2048 // len(sequences)):
            part = min(2048 // len(sequences), count - begin)
            batch, n = self.batch, 0
            for s in sequences:
                for i in range(part):
                    batch.token[n] = ((position + begin + i) * 7919 + s * 13 + 13) % self.vocab
                    batch.pos[n] = position + begin + i
                    batch.n_seq_id[n] = 1
                    batch.seq_id[n][0] = s
                    batch.logits[n] = begin + i == count - 1
                    n += 1
            batch.n_tokens = n
            if self.ll.llama_decode(self.context, batch):
                raise SystemExit("llama.cpp could not decode")


def llama_turn(args, repack: bool) -> dict[str, float]:
    """Medians of tokens/s of each row by llama.cpp, in this process."""
    longest = max([*args.n_prompt, args.n_gen]) + max(args.n_depth)
    result = {}
    for sequences in sorted(set(args.n_parallel) | {1}):
        peer = LlamaCpp(args.model, args.threads, longest, sequences, repack)
        peer.feed(1, 0, range(sequences))
        for depth in args.n_depth:
            peer.clear()
            for s in range(sequences if depth else 0):
                peer.feed(depth, 0, range(s, s + 1))

            def timed(calls: int, count: int) -> float:
                peer.forget(depth, sequences)
                start = time.perf_counter()
                for i in range(calls):
                    peer.feed(count, depth + i * count, range(sequences))
                return calls * count * sequences / (time.perf_counter() - start)

            for n in args.n_prompt if sequences == 1 else []:
                timed(1, n)
                result[name_of(n, 0, depth, 1)] = statistics.median(timed(1, n) for _ in range(args.repetitions))
            if args.n_gen and sequences in args.n_parallel:
                timed(8, 1)
                result[name_of(0, args.n_gen, depth, sequences)] = statistics.median(timed(args.n_gen, 1) for _ in range(args.repetitions))
    return result


def name_of(n_prompt: int, n_gen: int, depth: int, sequences: int) -> str:
    return (f"pp{n_prompt}" if n_prompt else f"tg{n_gen}") + (f" x{sequences}" if sequences > 1 else "") + (f" @{depth}" if depth else "")


def ckdist_turn(args, ranks: int, threads: int) -> dict[str, dict]:
    """`ckdist bench`'s rows by name, in `ranks` processes of `threads` threads."""
    listed = lambda values: ",".join(map(str, values)) or "0"
    context = max([*args.n_prompt, args.n_gen]) + max(args.n_depth)
    flags = ["-m", args.model, "-t", str(threads), "-p", listed(args.n_prompt), "-n", str(args.n_gen), "-npl", listed(args.n_parallel)]
    flags += ["-d", listed(args.n_depth), "-c", str(context), "-r", str(args.repetitions), "-o", "json"]
    command = [sys.executable, "-m", "ckdist.cli.main", "bench", *flags]
    if ranks > 1:
        command = [shutil.which("mpirun") or "mpirun", "-n", str(ranks), *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {name_of(row["n_prompt"], row["n_gen"], row["n_depth"], row["n_parallel"]): row for row in json.loads(done.stdout)}


def llama_turns(args) -> list[dict]:
    rows = []
    for repack in (True, False):
        command = [sys.executable, __file__, *sys.argv[1:], "--llama-turn", "repacked" if repack else "as-stored"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def table(args, llama: list[list[dict]], ours: dict[str, list[dict]]) -> list[dict]:
    """One row per measurement: medians over the turns, ratios to llama.cpp's better setting."""
    one, many = ours
    rows = []
    for name in ours[one][0]:
        peers = [statistics.median(turn[i][name] for turn in llama) for i in range(2)]
        row = {"row": name, "llama.cpp": peers[0], "llama.cpp not repacked": peers[1]}
        for label in (one, many):
            median = lambda key, label=label: statistics.median(turn[name][key] for turn in ours[label])
            row |= {label: median("median_ts"), f"{label} ratio": median("median_ts") / max(peers), f"{label} of bound": median("bound_fraction")}
            row["bound"] = ours[label][0][name]["bound"]
        row[f"{many} / {one}"] = row[many] / row[one]
        row["exchange share"] = statistics.median(turn[name]["exchange_share"] for turn in ours[many])
        rows.append(row)
    return rows


def plot(rows: list[dict], labels: list[str], title: str, path: str) -> None:
    """Bars of tokens/s, each beside the rate that the machine's limit would allow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(2.2 * len(rows) + 1, 4), squeeze=False)
    names = ["llama.cpp", "llama.cpp not repacked", *labels]
    for axis, row in zip(axes[0], rows):
        axis.bar(range(len(names)), [row[name] for name in names], color=["#888888", "#bbbbbb", "#1f77b4", "#17becf"])
        limit = row[labels[0]] / row[f"{labels[0]} of bound"]
        axis.axhline(limit, color="black", linestyle="--", linewidth=1)
        axis.set_title(f"{row['row']}\n{row['bound']} allows {limit:.0f}", fontsize=9)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axes[0][0].set_ylabel("tokens/s")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    integers = lambda text: [int(part) for part in text.split(",") if int(part)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--n-prompt", type=integers, default=[512], help="prompt lengths, as 512,2048; 0: none")
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-npl", "--n-parallel", type=integers, default=[1], help="sequences that generate together, as 1,4,8,16")
    parser.add_argument("-d", "--n-depth", type=lambda text: [int(part) for part in text.split(",")], default=[0], help="tokens of context before it")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--repetitions", type=int, default=2, help="measurements within a turn")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--plot", help="write a picture of the rows and the machine's limits")
    parser.add_argument("--llama-turn", choices=("repacked", "as-stored"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.llama_turn:
        with contextlib.redirect_stdout(sys.stderr):
            result = llama_turn(args, args.llama_turn == "repacked")
        print(json.dumps(result))
        return

    labels = [f"ckdist 1x{args.threads}", f"ckdist {args.threads}x1"]
    llama, ours = [], {label: [] for label in labels}
    for _ in range(args.rounds):
        llama.append(llama_turns(args))
        ours[labels[0]].append(ckdist_turn(args, 1, args.threads))
        ours[labels[1]].append(ckdist_turn(args, args.threads, 1))
    rows = table(args, llama, ours)
    title = f"{pathlib.Path(args.model).name}, {args.threads} threads in all, medians of {args.rounds} alternating turns"
    if args.plot:
        plot(rows, labels, title, args.plot)
    if args.output == "json":
        print(json.dumps({"model": args.model, "threads": args.threads, "rows": rows, "turns": {"llama.cpp": llama, **ours}}, indent=1))
        return
    print(f"{title} (ckdist RANKSxTHREADS); ratios to llama.cpp's better setting")
    one, many = labels
    print(f"| tokens/s | llama.cpp | not repacked | {one} | {many} | {many} / {one} | of the bound | exchange |\n|---|---|---|---|---|---|---|---|")
    for r in rows:
        cells = [r["row"], *(f"{r[name]:.1f}" for name in ("llama.cpp", "llama.cpp not repacked"))]
        cells += [f"{r[label]:.1f} ({r[f'{label} ratio']:.2f}x)" for label in labels]
        cells += [f"{r[f'{many} / {one}']:.2f}", f"{r[f'{one} of bound']:.0%} / {r[f'{many} of bound']:.0%} of {r['bound']}", f"{r['exchange share']:.1%}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
