"""When prefill by tokens pays: how long prompts take with tokens divided over ranks, and with matrices divided.

    python examples/token_parallel_prefill.py [-m MODEL] [--ranks 2] [--prompts 32,128,512]

By tensors each rank computes its part of every matrix for all tokens, and ranks sum after each block. By tokens each
rank computes whole matrices for its tokens, and reads the other ranks' shares of the weights where they lie: fewer
sums, more reading. So it pays from some length on. `ckdist serve` measures that itself (`--prefill auto`).
"""

import argparse
import json
import subprocess
import sys

BAR = 40  # characters of the fastest


def measure(how: str, args: argparse.Namespace) -> dict[int, float]:
    """Tokens per second by the prompt's length."""
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
