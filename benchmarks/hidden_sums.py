"""Exchanges between hosts of a prompt and of decode, and how much of their time hides behind products.

    PYTHONPATH=. python benchmarks/hidden_sums.py --save rows.jsonl
    python benchmarks/hidden_sums.py --show rows.jsonl

Hosts are those of limited_links.py, with one thread each. On every network a model runs with sums in one piece, and
with sums that begin while their product still runs. Times are those of rank 0's trace: exchanges are on their way, or
the thread waits for them. The part that is not waited for is hidden. A sum in one piece hides nothing.

A product that shares its core with other work takes longer and hides more, so this needs a quiet machine. With a delay,
packets of 64 KiB pass one process, which a core manages up to some 5 Gbit/s.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import tempfile
from typing import Any

from layouts_over_links import job, write
from limited_links import Host, network
from random_model import write_random_model

from tests.support.delayed_link import LinkDelay

LAYERS, PROMPT, GENERATED, ROUNDS = 2, 512, 8, 3
PACKET = 65000  # bytes, with a delay
CHUNKS = {"whole": 1e9, "in pieces": 0}  # least seconds of a piece on the link; 0: as usual
START = (
    "import sys, ckdist.comm.communicator as c; c.CHUNK_SECONDS = float(sys.argv.pop(1)) or c.CHUNK_SECONDS; "
    "from ckdist.cli.main import main; main()"
)


def union(spans: list[tuple[float, float]]) -> float:
    """The length of the union of (begin, end)."""
    total, at = 0.0, 0.0
    for begin, end in sorted(spans):
        total, at = total + max(0.0, end - max(at, begin)), max(at, end)
    return total


def exchanges(trace: pathlib.Path) -> dict[str, list[tuple[float, float]]]:
    """Rank 0's milliseconds of exchanges, and of waiting for them, of each step of prefill and of decode."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["pid"] == 0 and e["ph"] == "X"]
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for batch in (e for e in events if e["cat"] == "batch" and e["name"] != "publish"):
        end = batch["ts"] + batch["dur"]
        spans = {
            name: [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name and batch["ts"] <= e["ts"] < end]
            for name in ("exchange", "sum")
        }
        times = union(spans["exchange"] + spans["sum"]) / 1e3, union(spans["exchange"]) / 1e3
        found["decode" if batch["name"] == "decode" else "prefill"].append(times)
    return {kind: steps[1:] for kind, steps in found.items()}  # the first one packs weights


def measure(hosts: list[Host], model: pathlib.Path, least: float, folder: str) -> dict[str, Any]:
    """Milliseconds of a prompt and of a token, and medians of their exchanges."""
    trace = pathlib.Path(folder, "trace.json")
    words = ["bench", "-m", str(model), "-t", "1", "-r", str(ROUNDS), "-o", "json", "-c", "1024", "-pp", "1"]
    words += ["-p", str(PROMPT), "-n", str(GENERATED), "--comm-timeout", "60", "--trace", str(trace)]
    out, _ = job(hosts, 1, words, ["-c", START, str(least)])
    best = {"prefill" if row["n_prompt"] else "decode": max(row["samples_ts"]) for row in json.loads(out)}
    row: dict[str, Any] = {"prefill_ms": 1e3 * PROMPT / best["prefill"], "decode_ms": 1e3 / best["decode"]}
    for kind, steps in exchanges(trace).items():
        exchanged, waiting = (statistics.median(column) for column in zip(*steps, strict=True))
        row[kind] = {"exchanged": exchanged, "waiting": waiting, "hidden": 1 - waiting / exchanged}
    return row


def show(path: pathlib.Path) -> None:
    """The rows as a table in Markdown."""
    print("| link | hosts | sums | prompt, ms | exchanges | waited for | hidden | token, ms | exchanges |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in map(json.loads, path.read_text().splitlines()):
        prompt, token = row["prefill"], row["decode"]
        cells = [
            f"{row['megabits']:,} Mbit/s, {row['delay']:g} ms",
            row["hosts"],
            row["way"],
            f"{row['prefill_ms']:.0f}",
        ]
        cells += [f"{prompt['exchanged']:.0f}", f"{prompt['waiting']:.0f}", f"{prompt['hidden']:.0%}"]
        cells += [f"{row['decode_ms']:.1f}", f"{token['exchanged']:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    """Measures all networks, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--delay", type=float, default=1.0, help="milliseconds each way")
    parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("sums.jsonl"))
    parser.add_argument("--show", type=pathlib.Path)
    words = parser.parse_args()
    if words.show:
        show(words.show)
        return
    delay = LinkDelay(words.delay / 1e3, 0.0) if words.delay else None
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder, "model.gguf")
        write_random_model(model, LAYERS)
        for megabits, count in itertools.product(words.megabits, words.hosts):
            with network(count, megabits, delay, PACKET) as hosts:
                for way, least in CHUNKS.items():
                    place = {"hosts": count, "megabits": megabits, "delay": words.delay, "way": way}
                    write(words.save, place | measure(hosts, model, least, folder))


if __name__ == "__main__":
    main()
