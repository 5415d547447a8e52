"""All predictions held against measurements: of models by number of ranks, and of trainings; signed errors.

    python benchmarks/all_predictions.py MODEL.gguf... [--ranks 1 2] [--under COMMAND] [--json FILE] [--machine FILE]

Runs `predictions.py` of each model and number of ranks, and `training_predictions.py`, one process after the other, on
kernels that are measured once. Each takes two or three minutes. `--under`: a command that each of them is run by, as
one that waits for a quiet machine. `--json`: a file of all numbers, which is written after each process; what it has
already is not measured again, so that several runs add up to one table, on the kernels in --machine, which the first
of them measures; each begins nothing more after --seconds. Threads are divided over the ranks.
"""

import argparse
import json
import math
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
CKDIST = [sys.executable, "-m", "ckdist.cli.main"]
SPEEDS = "prefill", "decode 1", "decode 4"
MEMORY = "weights", "cache", "process"
TRAININGS = "trainings"


def run(words, under):
    """Runs a command, whose lines are shown; whether it did what it should."""
    print("$", shlex.join(words), file=sys.stderr, flush=True)
    return subprocess.run([*under, *words], stdout=sys.stderr).returncode == 0


def rows_of(script, arguments, ranks, under, folder):
    """What a benchmark found, on so many ranks; nothing if it failed."""
    target = pathlib.Path(folder, "rows.json")
    target.unlink(missing_ok=True)
    launch = [*CKDIST, "launch", "-n", str(ranks), "--"] if ranks > 1 else []
    words = [*launch, sys.executable, str(HERE / script), *arguments, "--json", str(target)]
    if not run(words, under) or not target.exists():
        return []
    found = json.loads(target.read_text())
    return found["rows"] if isinstance(found, dict) else found


def table(rows):
    """The lines of the tables."""
    cases = dict.fromkeys((row["model"], row["ranks"]) for row in rows if "what" in row)
    error = {(row["model"], row["ranks"], row.get("what") or row["mesh"]): row["error"] for row in rows}
    yield f"| model | ranks | {' | '.join((*SPEEDS, *MEMORY))} |"
    yield "|---" * (2 + len(SPEEDS + MEMORY)) + "|"
    for case in cases:
        cells = [f"{error[(*case, what)]:+.1%}" if (*case, what) in error else "" for what in SPEEDS + MEMORY]
        yield f"| {case[0].removesuffix('.gguf')} | {case[1]} | {' | '.join(cells)} |"
    yield ""
    yield "| training | ranks | predicted | measured | error |\n|---|---|---|---|---|"
    for row in rows:
        if "mesh" in row:
            seconds = f"{row['predicted']:.3f} s | {row['measured']:.3f} s"
            yield f"| {row['model']} | {row['mesh']} | {seconds} | {row['error']:+.1%} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--machine", help="a file for the kernels, which are measured where it is not there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no measurement begins")
    parser.add_argument("--under", default="", help="a command that runs each measurement")
    parser.add_argument("--json", help="file of all numbers, to which new ones are added")
    given, began = parser.parse_args(), time.monotonic()
    under, turns = shlex.split(given.under), ["--turns", str(given.turns)]
    kept = pathlib.Path(given.json) if given.json else None
    rows = json.loads(kept.read_text()) if kept and kept.exists() else []
    known = {(row["model"] if "what" in row else TRAININGS, row["ranks"]) for row in rows}
    cases = [(model, ranks) for ranks in given.ranks for model in (*given.models, TRAININGS)]
    cases = [case for case in cases if (pathlib.Path(case[0]).name, case[1]) not in known]
    with tempfile.TemporaryDirectory() as folder:
        kernels = pathlib.Path(given.machine or pathlib.Path(folder, "machine.toml"))
        machine = ["--machine", str(kernels)]
        measured = kernels.exists() or not cases
        if not measured and not run([*CKDIST, "bench", "machine", "--save", str(kernels)], under):
            raise SystemExit("the machine could not be measured")
        for model, ranks in cases:
            if time.monotonic() - began > given.seconds:
                break
            if model == TRAININGS:
                rows += rows_of("training_predictions.py", [*machine, *turns], ranks, under, folder)
            else:
                words = [*machine, *turns, "--tries", str(given.tries), model]
                rows += rows_of("predictions.py", words, ranks, under, folder)
            if kept:
                kept.write_text(json.dumps(rows, indent=1))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
