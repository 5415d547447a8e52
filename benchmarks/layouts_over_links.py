"""Tensors, stages and both over two and three hosts whose links are limited: decode, prefill, what `--layout auto`
predicts of each and takes, and other engines on the same links.

    python benchmarks/layouts_over_links.py -m MODEL.gguf --hosts 2 --megabits 100 --save rows.jsonl
    python benchmarks/layouts_over_links.py --show rows.jsonl

Each call is one turn, of all ways or of those that `--ways` names; of several turns in one file the medians are shown.
`llama.cpp` needs the folder of its programs, `distributed-llama` its program and a model of its own format.

Hosts are those of limited_links.py: with more hosts than cores some share one, and stages cannot work at the same time
there. `both` has two ranks on each host, which share its core. Only the network is limited: memory and caches are the
machine's own.
"""

import argparse
import json
import os
import pathlib
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from limited_links import Host, network
from link_peers import DistributedLlama, LlamaCppRpc

from tests.support.delayed_link import LinkDelay

PORT = 29555
SECONDS = 280  # of one job
PROMPT, GENERATED, SEQUENCES = 2048, 16, 8
WAYS = {  # ranks of each host, and flags; N: the number of hosts
    "auto": (1, ["--layout", "auto"]), "tensors": (1, ["-pp", "1"]),
    "stages": (1, ["-pp", "N"]), "both": (2, ["-pp", "N"]),
}  # fmt: skip
LAYOUTS = ("tensors", "stages")
PEERS = ("llama.cpp", "distributed-llama")
COLUMNS = ("decode, 1 sequence", f"decode, {SEQUENCES} sequences", f"prefill, {PROMPT} tokens")


def job(
    hosts: list[Host], each: int, words: list[str], program: Sequence[str] = ("-m", "ckdist.cli.main")
) -> tuple[str, str]:
    """What rank 0 of `ckdist words...` on so many ranks of each host prints, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        secret = pathlib.Path(folder, "secret")
        secret.write_text(secrets.token_hex())
        secret.chmod(0o600)
        size = each * len(hosts)
        told = {
            "WORLD_SIZE": size,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": PORT,
            "CKDIST_JOB_SECRET_FILE": secret,
        }
        ranks = []
        for rank in range(size):
            env = {**os.environ, **{key: str(value) for key, value in told.items()}, "RANK": str(rank)}
            command = hosts[rank // each].command([sys.executable, *program, *words])
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **pipes))
        try:
            out, said = ranks[0].communicate(timeout=SECONDS)
            for rank in ranks[1:]:
                rank.communicate(timeout=20)
        finally:
            for rank in ranks:
                rank.kill()
    if ranks[0].returncode:
        raise SystemExit(f"{' '.join(words)}: {said.strip()[-300:]}")
    return out, said


def rates(out: str) -> list[float]:
    """Tokens per second of the rows of `ckdist bench`: one sequence, several, a prompt."""
    rows = json.loads(out)
    found = {(row["n_prompt"], row["n_gen"], row["n_parallel"]): row["median_ts"] for row in rows}
    return [found[0, GENERATED, 1], found[0, GENERATED, SEQUENCES], found[PROMPT, 0, 1]]


def measure(
    model: str, count: int, megabits: int, delay: LinkDelay | None, ways: list[str], peers: dict, save: pathlib.Path
) -> None:
    """Appends a row for each way; of `auto` what it says."""
    common = ["bench", "-m", model, "-t", "1", "-r", "1", "-o", "json", "-c", "2304", "--comm-timeout", "60"]
    sizes = ["-p", str(PROMPT), "-n", str(GENERATED), "-npl", f"1,{SEQUENCES}"]
    place = {"hosts": count, "megabits": megabits} | ({"delay": delay.seconds, "loss": delay.loss} if delay else {})
    with network(count, megabits, delay) as hosts:
        for way in ways:
            if way in peers:
                found = peers[way].rates(hosts, PROMPT, GENERATED, SEQUENCES)
                write(save, place | {"way": way, "tokens_per_second": found})
                continue
            each, flags = WAYS[way]
            if way == "auto":
                _, said = job(hosts, each, [*common, "-p", "512", "-n", "0", *flags])
                line = next(line for line in said.splitlines() if line.startswith("layout: "))
                write(save, place | {"way": way, "said": line})
            else:
                out, _ = job(hosts, each, [*common, *sizes, *(str(count) if flag == "N" else flag for flag in flags)])
                write(save, place | {"way": way, "tokens_per_second": rates(out)})


def write(save: pathlib.Path, row: dict) -> None:
    """One row, told and kept."""
    print(json.dumps(row), flush=True)
    with open(save, "a") as file:
        file.write(json.dumps(row) + "\n")


def medians(rows: list[dict]) -> dict[str, list[float | None]]:
    """Tokens per second of each way, the median of its turns; None where it has no such row."""
    turns: dict[str, list[list[float | None]]] = {}
    for row in rows:
        if row["way"] != "auto":
            turns.setdefault(row["way"], []).append(row["tokens_per_second"])
    return {
        way: [None if None in each else statistics.median(each) for each in zip(*found, strict=True)]
        for way, found in turns.items()
    }


def show(path: pathlib.Path) -> None:
    """The rows as a table in Markdown: median tokens per second, the best of each in bold, what `auto` chose, and which
    of tensors and stages it predicted to be the faster.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"| hosts, link | | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    winners, lines = [], []
    for place in sorted({(row["megabits"], row["hosts"]) for row in rows}):
        name = f"{place[1]}, {place[0]:,} Mbit/s"
        here = [row for row in rows if (row["megabits"], row["hosts"]) == place]
        said = [row["said"] for row in here if row["way"] == "auto"]
        taken = {"tensors" if "layout: tensors" in line else "stages" for line in said}
        found = medians(here)
        best = [max(value for value in column if value) for column in zip(*found.values(), strict=True)]
        for way, values in found.items():
            cells = [
                "" if value is None else f"**{value:,.1f}**" if value == top else f"{value:,.1f}"
                for value, top in zip(values, best, strict=True)
            ]
            turns = sum(row["way"] == way for row in here)
            print(f"| {name} | {way} ({'`auto`, ' * (way in taken)}{turns} turns) | {' | '.join(cells)} |")
        for column, what in enumerate(COLUMNS):
            tensors, stages = (statistics.median(predicted(line)[way][column] for line in said) for way in LAYOUTS)
            measured = [found[way][column] for way in LAYOUTS]
            right = (tensors < stages) == (measured[0] > measured[1])
            winners.append(right)
            cells = [f"{tensors:,.1f}", f"{stages:,.1f}", f"{measured[0] / measured[1]:.2f}", "yes" if right else "no"]
            lines.append(f"| {name} | {what} | {' | '.join(cells)} |")
    print("\n| hosts, link | | tensors, ms predicted | stages | tensors / stages, measured | as predicted |")
    print("|---|---|---|---|---|---|", *lines, sep="\n")
    print(f"\nThe predicted one is the faster one in {sum(winners)} of {len(winners)} cases.")


def predicted(line: str) -> dict[str, list[float]]:
    """Milliseconds that `auto` predicts of tensors and stages: a token of one sequence, a step of several, a prompt."""
    pairs = re.findall(r"([\d.]+) against ([\d.]+) (ms|s) (?:for|of)", line)
    scale = {"ms": 1.0, "s": 1e3}
    chosen, other = ([float(pair[i]) * scale[pair[2]] for pair in pairs] for i in (0, 1))
    return dict(zip(LAYOUTS if "layout: tensors" in line else LAYOUTS[::-1], (chosen, other), strict=True))


def main() -> None:
    """Measures one network, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--megabits", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds each way")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of packets, each way")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *PEERS], default=list(WAYS))
    parser.add_argument("--llama-cpp", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model, for llama.cpp")
    parser.add_argument("--distributed-llama", nargs=3, metavar=("PROGRAM", "MODEL", "TOKENIZER"))
    parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("layouts.jsonl"))
    parser.add_argument("--show", type=pathlib.Path)
    words = parser.parse_args()
    if words.show:
        show(words.show)
        return
    peers = {}
    if words.llama_cpp:
        peers["llama.cpp"] = LlamaCppRpc(words.llama_cpp, words.model, words.layers)
    if words.distributed_llama:
        program, model, tokenizer = words.distributed_llama
        peers["distributed-llama"] = DistributedLlama(pathlib.Path(program), model, tokenizer)
    if missing := set(words.ways) & set(PEERS) - set(peers):
        parser.error(f"--{min(missing).replace('.', '-')} says where {min(missing)} is")
    delay = LinkDelay(words.delay / 1e3, words.loss / 1e2) if words.delay or words.loss else None
    measure(words.model, words.hosts, words.megabits, delay, words.ways, peers, words.save)


if __name__ == "__main__":
    main()
