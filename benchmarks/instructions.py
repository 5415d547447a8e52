"""Instructions per token of decode and prefill, counted by callgrind, compared with those on record.

    python benchmarks/instructions.py [--update]        (make bench-check)

The count of one thread does not depend on what else the machine does, so a change that makes the replay slower shows
even on a noisy machine. valgrind knows no AVX-512: counted are the AVX2 and the plain kernels, on the bundled model.
Exit code 1 where a count has grown by more than the tolerance; `--update` writes the new counts into instructions.json.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
RECORD = pathlib.Path(__file__).with_suffix(".json")
TOLERANCE = 0.01
STEP = ("ckdist::Inference::run(ckdist::BatchView const&)",)
DECODED, PROMPT = 8, 64
CASES = [("avx2", "bf16"), ("avx2", "q8_0"), ("avx2", "q4_k"), ("baseline", "q8_0")]


def replay(quantize: str, tokens: int, chunk: int) -> None:
    """What is counted: `tokens` tokens in chunks of `chunk`, by one thread."""
    from ckdist.comm.world import SingleWorld
    from ckdist.config.engine_config import EngineConfig
    from ckdist.engine.load_model import load_model
    from ckdist.engine.single import SingleSequence

    config = EngineConfig(threads=1, ctx_size=256, quantize=None if quantize == "bf16" else quantize, repack="off")
    model = load_model(config, SingleWorld())
    sequence = SingleSequence(model.executable)
    for begin in range(0, tokens, chunk):
        sequence.feed([7 + begin + i for i in range(chunk)], outputs="last")


def count(isa: str, quantize: str, tokens: int, chunk: int) -> int:
    """Instructions per token."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [f"--toggle-collect={function}" for function in STEP]
        command += [sys.executable, __file__, "--replay", quantize, str(tokens), str(chunk)]
        environment = {**os.environ, "CKDIST_ISA": isa, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found or int(found[1]) == 0:
        raise SystemExit(f"nothing was counted for {isa} {quantize}:\n{done.stderr[-2000:]}")
    return int(found[1]) // tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="keep what is counted now")
    parser.add_argument("--replay", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replay:
        replay(args.replay[0], int(args.replay[1]), int(args.replay[2]))
        return 0
    if not shutil.which("valgrind"):
        raise SystemExit("valgrind is not there: install it (Debian and Ubuntu: apt-get install valgrind)")
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    after, slower = {}, []
    for isa, quantize in CASES:
        for phase, tokens, chunk in (("decode", DECODED, 1), ("prefill", PROMPT, PROMPT)):
            name = f"{phase} {quantize} {isa}"
            after[name] = count(isa, quantize, tokens, chunk)
            change = after[name] / before[name] - 1 if name in before else 0.0
            print(
                f"{name:22s} {after[name]:>12,d} instructions per token, "
                f"{f'{change:+.2%}' if name in before else 'new'}",
                flush=True,
            )
            slower += [name] if change > TOLERANCE else []
    if args.update:
        RECORD.write_text(json.dumps(after, indent=1) + "\n")
    elif slower:
        print(
            f"more instructions than on record by over {TOLERANCE:.0%}: {', '.join(slower)}. If that is right, "
            f"keep it with --update",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
