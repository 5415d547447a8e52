"""Training in stages beside replicas on the same ranks: tokens per second, and the bubble measured and by formula.
Ways alternate; of several turns the medians are shown.

    python benchmarks/training_stages.py --ranks 2 --turns 3

The model is a Llama of 12 layers, hidden 512, vocabulary 4096, in bfloat16 with AdamW. A step has 12 batches of 2 x 256
tokens, whatever the way. Each rank has one thread, so with more ranks than cores some share one, and what stages wait
for each other is not only their bubble.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

BATCHES, STEPS, WARM_UP = 12, 6, 2
SECONDS = 600  # of one training
CONFIG = """\
output_dir = "{folder}/out"
train_file = ["{{stdlib}}/json/*.py", "{{stdlib}}/email/*.py", "{{stdlib}}/asyncio/*.py"]
per_device_train_batch_size = 2
max_length = 256
max_steps = {steps}
logging_steps = 1
save_steps = 1000000
bf16 = true
[model_config]
model_type = "llama"
vocab_size = 4096
hidden_size = 512
intermediate_size = 1408
num_hidden_layers = 12
num_attention_heads = 8
num_key_value_heads = 8
tie_word_embeddings = true
"""


def ways(ranks: int) -> dict[str, list[str]]:
    """The settings of each way."""
    stages = [f"gradient_accumulation_steps={BATCHES}", f"pipeline_parallel_size={ranks}"]
    return {
        f"{ranks} replicas": [f"gradient_accumulation_steps={BATCHES // ranks}"],
        f"{ranks} stages": stages,
        f"{ranks} stages of 2 chunks": [*stages, "virtual_pipeline_parallel_size=2"],
    }


def turn(ranks: int, settings: list[str]) -> dict:
    """One training: medians of its steps but the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder, "config.toml")
        config.write_text(CONFIG.format(folder=folder, steps=STEPS + WARM_UP))
        words = [sys.executable, "-m", "ckdist.cli.main"]
        command = [*words, "launch", "-n", str(ranks), *words, "train", str(config)]
        for setting in (*settings, "threads=1"):
            command += ["--set", setting]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)}: {ran.stderr[-1000:]}")
        lines = [json.loads(line) for line in pathlib.Path(folder, "out", "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "tokens_per_second" in line][WARM_UP:]
    return {
        name: statistics.median(line[name] for line in steps)
        for name in ("tokens_per_second", "bubble", "bubble_formula")
        if name in steps[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[dict]] = {}
    for _ in range(given.turns):
        for way, settings in ways(given.ranks).items():
            found.setdefault(way, []).append(turn(given.ranks, settings))
            print(f"{way}: {found[way][-1]}", file=sys.stderr, flush=True)
    first = next(iter(found.values()))
    print("| | tokens/s | to replicas | bubble, measured | by formula |\n|---|---|---|---|---|")
    for way, turns in found.items():
        middle = lambda name, turns=turns: statistics.median(one[name] for one in turns)
        ratio = statistics.median(
            one["tokens_per_second"] / other["tokens_per_second"] for one, other in zip(turns, first, strict=True)
        )
        waits = [f"{middle(name):.1%}" if name in turns[0] else "" for name in ("bubble", "bubble_formula")]
        print(f"| {way} | {middle('tokens_per_second'):,.0f} | {ratio:.2f} | {' | '.join(waits)} |")


if __name__ == "__main__":
    main()
