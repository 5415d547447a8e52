"""Tensors, stages and both over two and three hosts whose links are limited: decode, prefill, and what `--layout auto`
takes.

    python benchmarks/layouts_over_links.py -m MODEL.gguf --hosts 2 --megabits 100 --save rows.jsonl
    python benchmarks/layouts_over_links.py --show rows.jsonl

Each call is one turn, of all ways or of those that `--ways` names; of several turns in one file the medians are shown.

Hosts are network namespaces of this machine behind one bridge, each with a token bucket on either end of its link
(bursts of two milliseconds), so it needs root, ip and tc. Each host has one core: those of this machine in turn, so
with more hosts than cores some share one, and stages cannot work at the same time there. `both` has two ranks on each
host, which share its core. Only the network is limited: memory and caches are the machine's own.
"""

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ADDRESS = "10.88.{}.{}"
PORT = 29555
SECONDS = 280  # of one job
PROMPT, GENERATED, SEQUENCES = 2048, 16, 8
WAYS = {  # ranks of each host, and flags; N: the number of hosts
    "auto": (1, ["--layout", "auto"]), "tensors": (1, []), "stages": (1, ["-pp", "N"]), "both": (2, ["-pp", "N"]),
}  # fmt: skip
COLUMNS = ("decode, 1 sequence", f"decode, {SEQUENCES} sequences", f"prefill, {PROMPT} tokens")


def run(*words: str) -> None:
    """A command that must work."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def network(count: int, megabits: int) -> Iterator[list[tuple[str, str]]]:
    """Name and address of each of so many hosts, whose links send at most so many megabits a second."""
    key = os.getpid() % 10000
    bridge, names = f"lk{key}s", [f"lk{key}h{i}" for i in range(count)]
    block = key % 250
    try:
        for name in (bridge, *names):
            run("ip", "netns", "add", name)
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            port, link = f"port{i}", f"lk{key}e{i}"
            run("ip", "link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{ADDRESS.format(block, i + 1)}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for where, device in ((name, link), (bridge, port)):
                bucket = ["rate", f"{megabits}mbit", "burst", f"{max(32, megabits // 4)}kb", "latency", "100ms"]
                run("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
        yield [(name, ADDRESS.format(block, i + 1)) for i, name in enumerate(names)]
    finally:
        for name in (bridge, *names):
            subprocess.run(("ip", "netns", "del", name), capture_output=True, timeout=20)


def job(hosts: list[tuple[str, str]], each: int, words: list[str]) -> tuple[str, str]:
    """What rank 0 of `ckdist words...` on so many ranks of each host prints, and what it says."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        secret = pathlib.Path(folder, "secret")
        secret.write_text(secrets.token_hex())
        secret.chmod(0o600)
        size = each * len(hosts)
        told = {"WORLD_SIZE": size, "MASTER_ADDR": hosts[0][1], "MASTER_PORT": PORT, "CKDIST_JOB_SECRET_FILE": secret}
        ranks = []
        for rank in range(size):
            name, host = hosts[rank // each][0], rank // each
            inside = [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "bash",
                "-c",
                f'hostname {name} && exec "$@"',
                "-",
            ]
            pinned = ["taskset", "-c", str(cores[host % len(cores)])]
            env = {**os.environ, **{key: str(value) for key, value in told.items()}, "RANK": str(rank)}
            command = [*inside, *pinned, sys.executable, "-m", "ckdist.cli.main", *words]
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


def measure(model: str, count: int, megabits: int, ways: list[str], save: pathlib.Path) -> None:
    """Appends a row for each way; of `auto` what it says."""
    common = ["bench", "-m", model, "-t", "1", "-r", "1", "-o", "json", "-c", "2304", "--comm-timeout", "60"]
    sizes = ["-p", str(PROMPT), "-n", str(GENERATED), "-npl", f"1,{SEQUENCES}"]
    place = {"hosts": count, "megabits": megabits}
    with network(count, megabits) as hosts:
        for way in ways:
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


def show(path: pathlib.Path) -> None:
    """The rows as a table in Markdown: median tokens per second, the best of each in bold, and what `auto` chose."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"| hosts, link | | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for place in sorted({(row["megabits"], row["hosts"]) for row in rows}):
        here = [row for row in rows if (row["megabits"], row["hosts"]) == place]
        taken = {"tensors" if "layout: tensors" in row["said"] else "stages" for row in here if row["way"] == "auto"}
        found: dict[str, list[list[float]]] = {}
        for row in here:
            if row["way"] != "auto":
                found.setdefault(row["way"], []).append(row["tokens_per_second"])
        medians = {way: [statistics.median(each) for each in zip(*turns, strict=True)] for way, turns in found.items()}
        best = [max(column) for column in zip(*medians.values(), strict=True)]
        for way, turns in found.items():
            cells = [
                f"**{value:.1f}**" if value == top else f"{value:.1f}"
                for value, top in zip(medians[way], best, strict=True)
            ]
            name = f"{way} ({'`auto`, ' * (way in taken)}{len(turns)} turns)"
            print(f"| {place[1]}, {place[0]} Mbit/s | {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measures one network, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--megabits", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("layouts.jsonl"))
    parser.add_argument("--show", type=pathlib.Path)
    words = parser.parse_args()
    if words.show:
        show(words.show)
    else:
        measure(words.model, words.hosts, words.megabits, words.ways, words.save)


if __name__ == "__main__":
    main()
