"""Makes tests/golden/real/NAME.npz: what transformers computes in float32 of two dequantised published models.

    pip install 'torch==2.13.0' 'transformers>=4.50' accelerate gguf
    python tests/golden/make_real_golden.py NAME MODEL.gguf IDS.npy [FULL.npy]

IDS.npy holds the first n ids of the Apache License 2.0 with a line feed before it, int32 (n,). NAME.npz gets `ids`;
`next_logprob` (n - 1,) of each id but the first; and after each of the first 512 `top_ids` and `top_logprobs` (512,
64), most likely first. FULL.npy, where it is named, gets all log-probabilities of those, float32 (512, vocab), to
measure how much of a KL divergence the 64 show.

NAME.tokens.json beside it is of llama.cpp's tokenizer: 61 texts with their ids without BOS, special tokens as text
(`ids`) and parsed (`ids_special`).
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

OUT = pathlib.Path(__file__).parent / "real"
TOP, SHOWN = 64, 512


def main(name: str, model: str, ids_file: str, full: str | None = None) -> None:
    torch.manual_seed(0)
    path = pathlib.Path(model)
    network = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = np.load(ids_file).astype(np.int32)
    with torch.no_grad():
        logits = network(torch.tensor(ids[None].astype(np.int64))).logits[0]
    logprobs = torch.cat([torch.log_softmax(part.double(), -1).float() for part in logits.split(64)])
    top = logprobs[:SHOWN].topk(TOP)
    following = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:].astype(np.int64))]
    id_type = np.uint16 if logits.shape[1] < 1 << 16 else np.uint32
    arrays = dict(
        ids=ids, top_ids=top.indices.numpy().astype(id_type), top_logprobs=top.values.numpy().astype(np.float32)
    )
    np.savez_compressed(OUT / f"{name}.npz", next_logprob=following.numpy().astype(np.float32), **arrays)
    print(f"{name}: perplexity {np.exp(-following.numpy().mean()):.4f}, {(OUT / f'{name}.npz').stat().st_size} bytes")
    if full:
        np.save(full, logprobs[:SHOWN].numpy().astype(np.float32))


if __name__ == "__main__":
    main(*sys.argv[1:])
