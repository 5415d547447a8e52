"""Tensors, stages and both over two and three hosts whose links are limited: decode, prefill, and what `--layout auto`
takes.

    python benchmarks/layouts_over_links.py -m MODEL.gguf --hosts 2 --megabits 100 --save rows.jsonl
    python benchmarks/layouts_over_links.py --show rows.jsonl

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
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ADDRESS = "10.88.{}.{}"
PORT = 29555
SECONDS = 170  # of one job
PROMPT, GENERATED, SEQUENCES = 2048, 16, 8
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


def measure(model: str, count: int, megabits: int, save: pathlib.Path) -> None:
    """Appends a row for each way, and one for what `auto` takes."""
    common = ["bench", "-m", model, "-t", "1", "-r", "1", "-o", "json", "-c", "2304", "--comm-timeout", "60"]
    sizes = ["-p", str(PROMPT), "-n", str(GENERATED), "-npl", f"1,{SEQUENCES}"]
    ways = {"tensors": (1, []), "stages": (1, ["-pp", str(count)]), "both": (2, ["-pp", str(count)])}
    with network(count, megabits) as hosts:
        _, said = job(hosts, 1, [*common, "-p", "512", "-n", "0", "--layout", "auto"])
        line = next(line for line in said.splitlines() if line.startswith("layout: "))
        write(save, {"hosts": count, "megabits": megabits, "way": "auto", "said": line})
        for way, (each, flags) in ways.items():
            out, _ = job(hosts, each, [*common, *sizes, *flags])
            write(save, {"hosts": count, "megabits": megabits, "way": way, "tokens_per_second": rates(out)})


def write(save: pathlib.Path, row: dict) -> None:
    """One row, told and kept."""
    print(json.dumps(row), flush=True)
    with open(save, "a") as file:
        file.write(json.dumps(row) + "\n")


def show(path: pathlib.Path) -> None:
    """The rows as a table in Markdown: tokens per second, the best of each in bold, and what `auto` chose."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"| hosts, link | | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for place in dict.fromkeys((row["hosts"], row["megabits"]) for row in rows):
        here = [row for row in rows if (row["hosts"], row["megabits"]) == place]
        chosen = re.search(r"layout: (\d+ stages|tensors)", next(r["said"] for r in here if r["way"] == "auto"))
        takes = "tensors" if chosen is None or chosen[1] == "tensors" else "stages"
        measured = [row for row in here if row["way"] != "auto"]
        best = [max(column) for column in zip(*(row["tokens_per_second"] for row in measured), strict=True)]
        for row in measured:
            cells = [
                f"**{value:.1f}**" if value == top else f"{value:.1f}"
                for value, top in zip(row["tokens_per_second"], best, strict=True)
            ]
            name = f"{row['way']} (auto)" if row["way"] == takes else row["way"]
            print(f"| {place[0]}, {place[1]} Mbit/s | {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measures one network, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--megabits", type=int, default=1000)
    parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("layouts.jsonl"))
    parser.add_argument("--show", type=pathlib.Path)
    words = parser.parse_args()
    if words.show:
        show(words.show)
    else:
        measure(words.model, words.hosts, words.megabits, words.save)


if __name__ == "__main__":
    main()
