"""Trains the bundled model from random weights: a Llama on the text of Python's own standard library.

    python examples/bundled_model.py --out ckdist/models/bundled
    python examples/bundled_model.py --out ckdist/models/bundled --set max_steps=1000    # as in `ckdist train`

It writes the corpus into bundled_train/ and trains as configured in examples/train_bundled.toml. A stopped run
continues. Then it replaces the files in --out by the finished model and a card with the run's metrics.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from bundled_corpus import Corpus

from ckdist.train.config import load_config
from ckdist.weights.safetensors import read_safetensors

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: psf-2.0
language: en
---
# The bundled model

A Llama of {parameters:.1f} million parameters ({layers} layers, hidden {hidden}, {heads} heads on {kv_heads} kv heads,
tied embeddings, byte-level BPE of {vocab} tokens, context {context}), small enough to travel with the package. It
completes text that looks like Python and says what functions of the standard library do. It is for trying the server
and for tests: what it says is often wrong.

## How it was made

`examples/bundled_model.py` trained it from random weights with `ckdist train`.

| | |
|---|---|
| data | the `.py` files of the standard library of Python {python} (without tests, idlelib and tables), its language \
reference, and chats made of its docstrings |
| documents | {documents} files and pages, {entries} documented names |
| characters | {characters:,}, without the chats |
| tokens trained on | {tokens:,} in {steps:,} steps ({epochs:.1f} epochs); of chats the answers alone count |
| sequence length | {context} |
| optimizer | AdamW, peak learning rate {learning_rate:g}, {schedule}, weight decay {weight_decay:g}, \
{batch} tokens a step, products in bfloat16 |
| training loss | {loss:.3f} nats per token (mean of the last {window} steps) |
| validation loss | {validation:.3f} nats per token, on {held_out} files held out |
| time | {minutes:.0f} minutes of steps in one process of {threads} threads, on a machine that others used as well |
| seed | {seed} |

## License

The text is Python's, under the Python Software Foundation License Version 2 (https://docs.python.org/3/license.html); \
modules that carry
their own notices keep them. The weights hold no other text.
"""
CONFIG = Path(__file__).with_name("train_bundled.toml")
WINDOW = 50  # the card's training loss is the mean over these last steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of train_bundled.toml"
    )
    args = parser.parse_args()
    config = load_config(str(CONFIG), args.set)
    corpus = Corpus.from_stdlib(config.seed)
    folder = Path(config.output_dir) / "corpus"
    if not folder.exists():
        folder.mkdir(parents=True)
        corpus.write(folder, config.model_config["vocab_size"], config.max_length)
    command = [
        sys.executable,
        "-m",
        "ckdist.cli.main",
        "train",
        str(CONFIG),
        *(word for field in args.set for word in ("--set", field)),
    ]
    done = subprocess.run(command)
    if done.returncode == 0:
        publish(Path(config.output_dir), args.out, config, corpus)
    return done.returncode


def publish(output: Path, out: Path, config, corpus: Corpus) -> None:
    """Copies the model to `out`. Each complete file replaces its old version."""
    out.mkdir(parents=True, exist_ok=True)
    (output / "model" / "README.md").write_text(card(output, config, corpus), encoding="utf-8")
    for file in sorted((output / "model").iterdir()):
        shutil.copyfile(file, out / f"{file.name}.tmp")
        (out / f"{file.name}.tmp").replace(out / file.name)


def card(output: Path, config, corpus: Corpus) -> str:
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == steps[-1]["step"], "logging_steps must be 1: the card adds up all steps"
    tensors = read_safetensors(output / "model" / "model.safetensors").values()
    model, decay = config.model_config, config.num_decay_steps
    return CARD.format(
        parameters=sum(int(np.prod(tensor.shape)) for tensor in tensors) / 1e6,
        layers=model["num_hidden_layers"],
        hidden=model["hidden_size"],
        heads=model["num_attention_heads"],
        kv_heads=model["num_key_value_heads"],
        vocab=model["vocab_size"],
        context=config.max_length,
        python=".".join(platform.python_version_tuple()[:2]),
        documents=len(corpus.train),
        entries=len(corpus.entries),
        characters=corpus.characters,
        tokens=sum(step["tokens"] for step in steps),
        steps=len(steps),
        epochs=steps[-1]["epoch"],
        learning_rate=config.learning_rate,
        schedule=f"falling over the last {decay} steps",
        weight_decay=config.weight_decay,
        batch=config.per_device_train_batch_size * config.max_length,
        window=WINDOW,
        loss=sum(step["loss"] * step["tokens"] for step in steps[-WINDOW:])
        / sum(step["tokens"] for step in steps[-WINDOW:]),
        validation=steps[-1]["eval_loss"],
        held_out=len(corpus.held_out),
        minutes=sum(step["seconds"] for step in steps) / 60,
        threads=config.threads or len(os.sched_getaffinity(0)),
        seed=config.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
