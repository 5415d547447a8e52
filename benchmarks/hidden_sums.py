"""Sums between hosts of a prompt and of decode: their time on the link, and how much of it hides behind products.

    PYTHONPATH=. python benchmarks/hidden_sums.py --save rows.jsonl
    python benchmarks/hidden_sums.py --show rows.jsonl

Hosts are those of limited_links.py, with one thread each. For every network a model runs with sums in one piece and
with sums that begin while their product still runs. Times are those of rank 0's trace: a sum is on its way from the
first byte until its last piece has arrived, and the thread waits for it after its product. The part of the former that
is not waited for is hidden. A sum in one piece hides nothing.

Other work on the cores makes products longer and so hides more: run it on a quiet machine. With --delay, packets of
64 KiB pass a process that holds them, which one core manages up to some 5 Gbit/s.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import tempfile

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


def sums_of(trace: pathlib.Path) -> dict[str, list[tuple[float, float, float]]]:
    """Rank 0's sums of prefill and of decode: milliseconds on the link, of waiting, and of the product before."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["pid"] == 0 and e["ph"] == "X"]
    found: dict[str, list[tuple[float, float, float]]] = {"prefill": [], "decode": []}
    for batch in (e for e in events if e["cat"] == "batch" and e["args"]["tokens"] in (1, PROMPT)):
        inside = [e for e in events if batch["ts"] <= e["ts"] <= batch["ts"] + batch["dur"]]
        steps = {e["args"]["step"]: e for e in inside if e["cat"] == "replay" and e["name"] == "linear"}
        for wait in (e for e in inside if e["name"] == "exchange" and e["args"]["step"] in steps):
            step, end = steps[wait["args"]["step"]], wait["ts"] + wait["dur"]
            begin = min([wait["ts"], *(e["ts"] for e in inside if e["name"] == "sum" and step["ts"] <= e["ts"] <= end)])
            kind = "decode" if batch["args"]["tokens"] == 1 else "prefill"
            found[kind].append(((end - begin) / 1e3, wait["dur"] / 1e3, (wait["ts"] - step["ts"]) / 1e3))
    return found


def measure(hosts: list[Host], model: pathlib.Path, least: float, folder: str) -> dict:
    """Milliseconds of a prompt and of a token, and medians of their sums."""
    trace = pathlib.Path(folder, "trace.json")
    words = ["bench", "-m", str(model), "-t", "1", "-r", str(ROUNDS), "-o", "json", "-c", "1024", "-pp", "1"]
    words += ["-p", str(PROMPT), "-n", str(GENERATED), "--comm-timeout", "60", "--trace", str(trace)]
    out, _ = job(hosts, 1, words, ["-c", START, str(least)])
    best = {"prefill" if row["n_prompt"] else "decode": max(row["samples_ts"]) for row in json.loads(out)}
    row: dict = {"prefill_ms": 1e3 * PROMPT / best["prefill"], "decode_ms": 1e3 / best["decode"]}
    for kind, sums in sums_of(trace).items():
        link, waiting, product = (statistics.median(column) for column in zip(*sums, strict=True))
        hidden = 1 - sum(own[1] for own in sums) / sum(own[0] for own in sums)
        row[kind] = {"link": link, "waiting": waiting, "product": product, "hidden": hidden, "sums": len(sums)}
    return row


def show(path: pathlib.Path) -> None:
    """The rows as a table in Markdown."""
    print("| link | hosts | sums | prompt, ms | a sum on its way | waited for | hidden | token, ms | a sum |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in map(json.loads, path.read_text().splitlines()):
        prompt, token = row["prefill"], row["decode"]
        cells = [
            f"{row['megabits']:,} Mbit/s, {row['delay']:g} ms",
            row["hosts"],
            row["way"],
            f"{row['prefill_ms']:.0f}",
        ]
        cells += [f"{prompt['link']:.1f}", f"{prompt['waiting']:.1f}", f"{prompt['hidden']:.0%}"]
        cells += [f"{row['decode_ms']:.1f}", f"{token['link']:.2f}"]
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
