"""ckdist beside llama.cpp on the same GGUF file with the same threads: single turns that alternate, medians, ratios.

python benchmarks/versus_llama_cpp.py -m MODEL.gguf [-t 2] [-p 512] [-n 128] [-npl 1] [-d 0] [-r 5] [-o table|json]
[--plot roofline.png] [--ik-llama FOLDER]

Needs the `peers` extra (llama-cpp-python, matplotlib). The contestants: llama.cpp with and without its repacking of
weights, ckdist with `-t` threads in one process, and ckdist with one rank per thread under mpirun. All have the model
loaded from beginning to end (benchmarks/contestants.py), and take single turns, the order reversed from round to round:
what the machine does to one it does to all. Before every round the memory is read by as many threads, and decode is
held against that. Ratios are to llama.cpp's better setting, row by row. With the folder of ik_llama.cpp's `llama-bench`
and `llama-batched-bench` these take their turns too, with weights as they are and repacked (`-rtr 1`), in a process of
their own each time. The second feeds all sequences the same token, so that they share their experts: a mixture of
experts needs a build of it that feeds several.

For llama.cpp without newer instructions, build its `ggml-cpu` without them and name a directory that has it beside the
package's other libraries in LLAMA_CPP_LIB_PATH; CKDIST_ISA chooses ckdist's level.
"""

import argparse
import json
import pathlib
import statistics
import sys

from contestants import Contestant, IkLlama, LostError

from ckdist import native
from ckdist.comm.world import SingleWorld
from ckdist.topology import place
from ckdist.topology.bandwidth import read_bandwidth

LLAMA_SETTINGS = {"llama.cpp": "repacked", "llama.cpp not repacked": "as-stored"}
IK_SETTINGS = ("ik_llama.cpp", "ik_llama.cpp repacked")
FIRST_ROW = {"n_prompt": 32, "n_gen": 0, "n_depth": 0, "n_parallel": 1}


def rows_of(args) -> list[dict]:
    """What is measured, as `ckdist bench` names it."""
    one = {"n_gen": 0, "n_parallel": 1}
    rows = [{**one, "n_prompt": n, "n_depth": d} for d in args.n_depth for n in args.n_prompt]
    return rows + [
        {"n_prompt": 0, "n_gen": args.n_gen, "n_parallel": s, "n_depth": d}
        for d in args.n_depth
        for s in args.n_parallel
        if args.n_gen
    ]


def cpu_name() -> str:
    """As /proc/cpuinfo names it; with family and model, which tell CPUs of one name apart."""
    lines = (line.partition(":") for line in pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    about = {key.strip(): value.strip() for key, _, value in lines}
    return f"{about.get('model name', 'CPU')} (family {about.get('cpu family', '?')} model {about.get('model', '?')})"


def name_of(row: dict) -> str:
    sequences, depth = row["n_parallel"], row["n_depth"]
    return (
        (f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}")
        + f" x{sequences}" * (sequences > 1)
        + f" @{depth}" * bool(depth)
    )


def measure(row: dict, contestants: dict[str, Contestant | IkLlama], rounds: int, bandwidth) -> dict[str, list[dict]]:
    """Each contestant's turns, none where it has no such row. What is bound by memory is held against what was read in
    the same round.
    """
    turns: dict[str, list[dict]] = {name: [] for name in contestants}
    for index in range(rounds):
        read = bandwidth()
        for name in sorted(contestants, reverse=bool(index % 2)):
            turn = contestants[name].turn(row)
            if turn is None:
                continue
            if turn.get("bound") == "bandwidth":
                turn["bound_fraction"] *= turn["read_bandwidth"] / read
            turns[name].append(turn)
    return turns


def summary(name: str, turns: dict[str, list[dict]], labels: list[str]) -> dict:
    """Medians over the turns, and ratios to each peer's better setting."""
    median = lambda label, key="median_ts": statistics.median(turn[key] for turn in turns[label])
    one, many = labels
    row = {"row": name, "bound": turns[one][0]["bound"]}
    row |= {name: median(name) for name in LLAMA_SETTINGS if name in turns}
    peer = max(row[name] for name in LLAMA_SETTINGS if name in row)
    for label in labels:
        row |= {
            label: median(label),
            f"{label} ratio": median(label) / peer,
            f"{label} of bound": median(label, "bound_fraction"),
        }
    if all(turns.get(name) for name in IK_SETTINGS):
        row |= {name: median(name) for name in IK_SETTINGS}
        row |= {f"{label} to ik": row[label] / max(row[name] for name in IK_SETTINGS) for label in labels}
    row[f"{many} / {one}"] = statistics.median(
        a["median_ts"] / b["median_ts"] for a, b in zip(turns[many], turns[one], strict=True)
    )
    row["exchange share"] = median(many, "exchange_share")
    return row


def cells(row: dict, labels: list[str], with_ik: bool) -> str:
    one, many = labels
    peers = [*LLAMA_SETTINGS, *(IK_SETTINGS if with_ik else ())]
    shown = [row["row"], *(f"{row[name]:.1f}" if name in row else "–" for name in peers)]
    to_ik = lambda label: f", {row[f'{label} to ik']:.2f}x" if f"{label} to ik" in row else ""
    shown += [f"{row[label]:.1f} ({row[f'{label} ratio']:.2f}x{to_ik(label)})" for label in labels]
    shown += [
        f"{row[f'{many} / {one}']:.2f}",
        f"{row[f'{one} of bound']:.0%} / {row[f'{many} of bound']:.0%} of {row['bound']}",
        f"{row['exchange share']:.1%}",
    ]
    return "| " + " | ".join(shown) + " |"


def llama_contestants(args) -> dict[str, Contestant]:
    """llama.cpp's settings. One that a small first row ends is told and left out; SystemExit where none is left."""
    found = {}
    for name, kind in LLAMA_SETTINGS.items():
        try:
            found[name] = Contestant(kind, args)
            found[name].turn(FIRST_ROW)
        except LostError as error:
            found.pop(name, None)
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
    if not found:
        raise SystemExit("llama.cpp does not run here with either setting")
    return found


def plot(rows: list[dict], labels: list[str], title: str, path: str) -> None:
    """Bars of tokens/s, each beside the rate that the machine's limit would allow."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(2.2 * len(rows) + 1, 4), squeeze=False)
    peers = {"llama.cpp": "#888888", "llama.cpp not repacked": "#bbbbbb"}
    colours = peers | dict(zip([*IK_SETTINGS, *labels], ("#8c6d31", "#bd9e39", "#1f77b4", "#17becf"), strict=True))
    for axis, row in zip(axes[0], rows, strict=True):
        names = [name for name in colours if name in row]
        axis.bar(range(len(names)), [row[name] for name in names], color=[colours[name] for name in names])
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
    parser.add_argument(
        "-npl", "--n-parallel", type=integers, default=[1], help="sequences that generate together, as 1,4,8,16"
    )
    parser.add_argument(
        "-d",
        "--n-depth",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0],
        help="tokens of context before it",
    )
    parser.add_argument("-r", "--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--plot", help="write a picture of the rows and the machine's limits")
    parser.add_argument("--ik-llama", metavar="FOLDER", help="ik_llama.cpp's programs, which take turns too")
    args = parser.parse_args()

    labels = [f"ckdist 1x{args.threads}", f"ckdist {args.threads}x1"]
    title = (
        f"{pathlib.Path(args.model).name}, {args.threads} threads in all, medians of {args.rounds} alternating turns"
    )
    cpus = place(SingleWorld(), args.threads).cpus
    title += f", {cpu_name()}, ckdist's {native.isa()} kernels"
    contestants = llama_contestants(args)
    contestants |= {labels[0]: Contestant("ckdist", args), labels[1]: Contestant("ckdist", args, ranks=args.threads)}
    with_ik = args.ik_llama is not None
    if with_ik:
        repacked = zip(IK_SETTINGS, (False, True), strict=True)
        contestants |= {name: IkLlama(args.ik_llama, args, repack) for name, repack in repacked}
    if args.output == "table":
        heads = ["tokens/s", "llama.cpp", "not repacked", *(IK_SETTINGS if with_ik else ()), *labels]
        heads += [f"{labels[1]} / {labels[0]}", "of the bound", "exchange"]
        peers = f"llama.cpp{', ik_llama.cpp' * with_ik}"
        print(f"{title} (ckdist RANKSxTHREADS); ratios to the better setting of {peers}")
        print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    rows, turns = [], {}
    for row in rows_of(args):
        name = name_of(row)
        turns[name] = measure(row, contestants, args.rounds, lambda: read_bandwidth(args.threads, cpus))
        rows.append(summary(name, turns[name], labels))
        if args.output == "table":
            print(cells(rows[-1], labels, with_ik), flush=True)
    for contestant in contestants.values():
        contestant.end()
    if args.plot:
        plot(rows, labels, title, args.plot)
    if args.output == "json":
        print(json.dumps({"model": args.model, "threads": args.threads, "rows": rows, "turns": turns}, indent=1))


if __name__ == "__main__":
    main()
