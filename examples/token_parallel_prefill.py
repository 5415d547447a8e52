"""When token-parallel prefill pays: times prompts with tokens sharded over ranks, and with matrices sharded.

    python examples/token_parallel_prefill.py [-m MODEL] [--ranks 2] [--prompts 32,128,512]

`tensor`: each rank computes its shard of every matrix for all tokens, and ranks add up after each block. `token`: each
rank computes whole matrices for its tokens, and reads the other ranks' shards of the weights from their memory. That is
fewer sums and more reading, so it pays from some length on. `ckdist serve` measures that itself (`--prefill auto`).
"""

import argparse
import json
import subprocess
import sys

BAR = 40  # characters of the longest bar


def measure(how: str, args: argparse.Namespace) -> dict[int, float]:
    """Returns tokens/s by prompt length."""
    words = ["bench", "-tp", str(args.ranks), "-t", "1", "-p", args.prompts, "-n", "0", "-r", str(args.repetitions)]
    model = ["-m", args.model] if args.model else []
    command = [sys.executable, "-m", "ckdist.cli.main", *words, *model, "--prefill", how, "-o", "json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
    return {row["n_prompt"]: row["avg_ts"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="default: the bundled model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", default="32,128,512")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    speeds = {how: measure(how, args) for how in ("tensor", "token")}
    best = max(speed for row in speeds.values() for speed in row.values())
    for length in speeds["tensor"]:
        for how, row in speeds.items():
            bar = "█" * round(BAR * row[length] / best)
            print(f"{length:6d} tokens by {how:6s} {bar:{BAR}s} {row[length]:8.0f} tokens/s")
        print(f"{'':14s}by tokens {speeds['token'][length] / speeds['tensor'][length]:.2f} times as fast")


if __name__ == "__main__":
    main()
