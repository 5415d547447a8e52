"""Decode and prompts on two hosts of unequal speed: `--tensor-split even`, and `auto`, which measures the shares.

    python benchmarks/unequal_hosts.py MODEL [PERCENT] [ROUNDS]

Each host is a network namespace with one core; a control group (version 1) gives the second one PERCENT of its core's
time (default 50). Prints the median rates of each host alone, of both with either setting, and their ratios to the sum
of both hosts. Needs root, ip, tc and two cores.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.limited_links import Host, network

GROUP = Path("/sys/fs/cgroup/cpu")
PERIOD = 10_000  # microseconds


def run(hosts: list[Host], model: str, split: str, folder: Path, group: Path) -> dict[str, float]:
    """Tokens per second of `ckdist bench` on these hosts; the one on the second core is in the control group."""
    secret = folder / "secret"
    job = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29557"}
    job |= {"CKDIST_JOB_SECRET_FILE": str(secret)} if len(hosts) > 1 else {}
    flags = ["-p", "64", "-n", "64", "-r", "3", "-t", "1", "-c", "256", "-o", "json", "-tp", str(len(hosts))]
    words = [sys.executable, "-m", "ckdist.cli.main", "bench", "-m", model, *flags, "-ts", split, "--transport", "tcp"]
    processes = []
    for rank, host in enumerate(hosts):
        command = host.command(words)
        if host.core:
            command = ["sh", "-c", 'echo $$ > "$0/tasks" && exec "$@"', str(group), *command]
        env = os.environ | (job | {"RANK": str(rank)} if len(hosts) > 1 else {})
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    out = [process.communicate(timeout=300) for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(error for _, error in out))
    rows = json.loads(out[0][0])
    return {"decode" if row["n_gen"] else "prompts": row["median_ts"] for row in rows if row["n_parallel"] == 1}


def main(model: str, percent: int = 50, rounds: int = 5) -> None:
    """Prints the table."""
    group = GROUP / f"ckdist-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(PERIOD * percent // 100))
        rates: dict[str, list[dict[str, float]]] = {}
        with tempfile.TemporaryDirectory() as name, network(2, 100_000) as hosts:
            secret = Path(name, "secret")
            secret.touch(0o600)
            secret.write_text(secrets.token_hex(16))
            for _ in range(rounds):
                for host in hosts:
                    rates.setdefault(f"host {host.core}", []).append(run([host], model, "auto", Path(name), group))
                for split in ("even", "auto"):
                    rates.setdefault(split, []).append(run(hosts, model, split, Path(name), group))
        print(f"| tokens/s, median of {rounds} | {' | '.join(rates)} | even / sum | auto / sum |")
        for kind in ("decode", "prompts"):
            found = {what: statistics.median(row[kind] for row in rows) for what, rows in rates.items()}
            whole = found["host 0"] + found["host 1"]
            shown = " | ".join(f"{rate:.1f}" for rate in found.values())
            print(f"| {kind} | {shown} | {found['even'] / whole:.2f} | {found['auto'] / whole:.2f} |")
    finally:
        group.rmdir()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
