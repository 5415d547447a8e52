"""`ckdist batch` that is killed at random moments: each line must have one result at the end.

Three of four kills come after the run has written a further result.

    python benchmarks/killed_batches.py [--lines 10000] [--kills 10] [FLAGS of ckdist batch]

Prints the results after each kill, and at the end the numbers of results, of different custom_ids and of errors.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

GROWTH_SECONDS = 120.0
WORDS = ("import", "def", "class", "return", "self", "os", "path", "the", "value", "list")


def results(*paths: pathlib.Path) -> collections.Counter[str]:
    """Counts the whole lines of each custom_id."""
    counts: collections.Counter[str] = collections.Counter()
    for path in paths:
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    counts[json.loads(line)["custom_id"]] += 1
    return counts


def wait_for_growth(path: pathlib.Path) -> None:
    """Waits until the file is larger, at most GROWTH_SECONDS."""
    size = lambda: path.stat().st_size if path.exists() else 0
    before, end = size(), time.monotonic() + GROWTH_SECONDS
    while size() <= before and time.monotonic() < end:
        time.sleep(0.05)


def main() -> None:
    """Writes the lines, kills the command again and again, and lets it end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    given, more = parser.parse_known_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        source, answers, errors = (folder / file for file in ("in.jsonl", "out.jsonl", "out.errors.jsonl"))
        with open(source, "w") as file:
            for number in range(given.lines):
                prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
                body = {
                    "prompt": prompt if number % 997 else "x" * 4000,
                    "max_tokens": rng.randint(1, 6),
                    "seed": number,
                }
                line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        command = [sys.executable, "-m", "ckdist.cli.main", "batch", "-i", str(source), "-o", str(answers), "-c", "256"]
        for kill in range(given.kills):
            process = subprocess.Popen([*command, *more], start_new_session=True, stderr=subprocess.DEVNULL)
            if kill % 4:
                wait_for_growth(answers)
            time.sleep(rng.uniform(0.0, 3.0))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            counts = results(answers, errors)
            print(
                f"kill {kill + 1}: {len(counts)} results, the most of one line {max(counts.values(), default=0)}",
                flush=True,
            )
            time.sleep(0.2)
        begun = time.monotonic()
        code = subprocess.run([*command, *more]).returncode
        counts = results(answers, errors)
        failed = len(results(errors))
        print(f"exit code {code} after {time.monotonic() - begun:.1f} s: {sum(counts.values())} results of "
              f"{len(counts)} of {given.lines} lines, {failed} of them errors")  # fmt: skip


if __name__ == "__main__":
    main()
