"""What `ckdist serve` chooses for prefill, start after start, on a machine whose cores are all kept busy.

    python benchmarks/busy_starts.py [--starts 20] [--ranks 2] [-m MODEL]

A process spins on every core meanwhile. Each start has an empty cache folder, so that nothing measured before is used.
Prints the line about kernels and prefill of each start, and how often each choice came.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

START_SECONDS, STOP_SECONDS = 120.0, 30.0
SPIN = "while True: pass"


@contextlib.contextmanager
def busy_cores():
    cores = sorted(os.sched_getaffinity(0))
    spinning = [subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", SPIN]) for core in cores]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def start(words: list[str]) -> tuple[str, float]:
    """The line about prefill that one start prints, and the seconds until the server says where it listens."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        begin = time.monotonic()
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        lines = []
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith("serving ") or time.monotonic() - begin > START_SECONDS:
                    break
            took = time.monotonic() - begin
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    found = [line for line in lines if "prefill: " in line]
    if not found:
        raise SystemExit("the server did not start:\n" + "\n".join(lines))
    return found[0], took


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-m", "--model", type=pathlib.Path, help="a file or folder; the bundled model without it")
    arguments = parser.parse_args()
    words = ["mpirun", "-n", str(arguments.ranks), sys.executable, "-m", "ckdist.cli.main", "serve", "--port", "0"]
    words += ["-m", str(arguments.model)] if arguments.model else []
    choices: collections.Counter[str] = collections.Counter()
    with busy_cores():
        for number in range(1, arguments.starts + 1):
            line, seconds = start(words)
            choices[line.partition("prefill: ")[2].partition(" (")[0]] += 1
            print(f"{number:3} {seconds:5.1f} s  {line}", flush=True)
    print(", ".join(f"{count} x {choice}" for choice, count in choices.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
