"""Sums and exchanges between two hosts with encryption and without, in turns: network namespaces joined by a bridge.

    python benchmarks/sealed_links.py [MEGABITS] [ROUNDS]

Prints the median seconds of a sum of each size, and their ratio. Needs root, ip and tc. Both hosts share this machine's
cores, so a link without limit is as fast as its memory.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.limited_links import Host, network

SIZES = 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20  # bytes


def rank(encrypt: str) -> None:
    """One rank: prints the seconds of a sum by size."""
    from ckdist.cli.bench_comm import Stopwatch
    from ckdist.comm.communicator import open_communicator
    from ckdist.comm.world import start_world

    world = start_world(encrypt)
    communicator = open_communicator(world, "tcp", timeout=60)
    watch, found = Stopwatch(communicator), {}
    for size in SIZES:
        data = np.ones(size // 4, np.float32)
        found[size] = min(watch.all_reduce(data, "float32") for _ in range(5))
    if world.rank == 0:
        print(json.dumps(found))
    communicator.close()
    world.close()


def run(hosts: list[Host], encrypt: str, secret: str) -> dict[str, float]:
    """The times of rank 0."""
    ranks = [
        subprocess.Popen(
            host.command([sys.executable, "-m", "benchmarks.sealed_links", "rank", encrypt]),
            env=os.environ
            | {"RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29555"}
            | {"CKDIST_JOB_SECRET_FILE": secret},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, host in enumerate(hosts)
    ]
    out = [p.communicate(timeout=120)[0] for p in ranks]
    if any(p.returncode for p in ranks):
        raise SystemExit("a rank failed")
    return json.loads(out[0])


def main(megabits: int = 100_000, rounds: int = 5) -> None:
    """Prints the table."""
    times: dict[str, list[dict[str, float]]] = {"never": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder, network(2, megabits) as hosts:
        secret = Path(folder, "secret")
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(16))
        for _ in range(rounds):
            for encrypt, found in times.items():
                found.append(run(hosts, encrypt, str(secret)))
    print(f"links of {megabits} Mbit/s, median of {rounds}, microseconds of a sum")
    print("| bytes | not encrypted | encrypted | ratio |\n|---|---|---|---|")
    for size in map(str, SIZES):
        plain, sealed = (statistics.median(found[size] for found in times[encrypt]) for encrypt in ("never", "auto"))
        print(f"| {size} | {plain * 1e6:.0f} | {sealed * 1e6:.0f} | {sealed / plain:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2])
    else:
        main(*map(int, sys.argv[1:]))
