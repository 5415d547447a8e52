"""Data-parallel training from Python: every rank has the whole model and its part of each batch.

    python examples/train_ddp.py                                             # one rank
    ckdist launch -n 2 --restarts 1 python examples/train_ddp.py             # two on this machine
    ckdist launch --hostfile hostfiles/mpich python examples/train_ddp.py    # on the hosts of a file
    mpirun --hostfile hostfiles/two-nodes -n 4 python examples/train_ddp.py  # the same under MPI

A step's loss is the mean over the tokens of all ranks. Twice the ranks with half the batch each is the same training. A
lost rank ends the job; `--restarts` continues from the last checkpoint.
"""

import argparse
import os

import ckdist

MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="train_ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="total sequences of a step over all ranks")
    args = parser.parse_args()
    # set by `ckdist launch` and torchrun, or by Open MPI
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    config = ckdist.TrainConfig(
        output_dir=args.output,
        model_config=MODEL,
        train_file=("{stdlib}/json/*.py", "{stdlib}/email/*.py"),  # Python's own sources, which every host has
        per_device_train_batch_size=args.batch // ranks,
        max_length=128,
        max_steps=args.steps,
        learning_rate=3e-3,
        save_steps=10,
        bf16=False,
        threads=1,
    )
    report = ckdist.train(config)
    if report is not None and os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        print(f"step {report.step} on {ranks} ranks: loss {report.loss:.3f}, {report.tokens} tokens")


if __name__ == "__main__":
    main()
