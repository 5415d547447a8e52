"""A model of any size with random weights in Q8_0 and the tokenizer of SmolLM2 (`ckdist pull smollm2`)."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ckdist.hub.resolve import resolve
from ckdist.weights.dtypes import F32, Q8_0
from ckdist.weights.gguf import read_gguf
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD = 2048, 8192, 32, 8, 64
ROWS = 512  # that are made at a time


def random_rows(rng: np.random.Generator, rows: int, columns: int) -> Callable[[], Iterator[np.ndarray]]:
    """Makes the blocks of a matrix whose products have about the variance of their input."""
    scale = np.frombuffer(np.float16(1 / 73 / columns**0.5).tobytes(), np.uint8)

    def made() -> Iterator[np.ndarray]:
        for begin in range(0, rows, ROWS):
            count = min(ROWS, rows - begin)
            blocks = np.empty((count, columns // 32, 34), np.uint8)
            blocks[..., :2] = scale
            blocks[..., 2:] = rng.integers(-127, 128, (count, columns // 32, 32), np.int8).view(np.uint8)
            yield blocks.reshape(-1)

    return made


def write_random_model(path: Path, layers: int) -> int:
    """Writes a GGUF file of 64 MB for each layer and 107 MB. Returns its bytes."""
    source = resolve("smollm2")
    assert source is not None
    metadata = {key: value for key, value in read_gguf(source).metadata.items() if key != "general.languages"}
    metadata |= {"llama.block_count": layers, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER}
    metadata |= {"llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KEY_HEADS}
    rng, tensors = np.random.default_rng(0), list[GgufTensorToWrite]()

    def add(name: str, rows: int, columns: int) -> None:
        tensors.append(GgufTensorToWrite(name, Q8_0, (rows, columns), random_rows(rng, rows, columns)))

    def norm(name: str) -> None:
        ones = np.ones(HIDDEN, np.float32).view(np.uint8)
        tensors.append(GgufTensorToWrite(name, F32, (HIDDEN,), lambda: [ones]))

    add("token_embd.weight", metadata["llama.vocab_size"], HIDDEN)
    norm("output_norm.weight")
    for layer in range(layers):
        name = f"blk.{layer}.{{}}.weight".format
        norm(name("attn_norm"))
        norm(name("ffn_norm"))
        for part, heads in (("attn_q", HEADS), ("attn_k", KEY_HEADS), ("attn_v", KEY_HEADS)):
            add(name(part), heads * HEAD, HIDDEN)
        add(name("attn_output"), HIDDEN, HIDDEN)
        add(name("ffn_gate"), INNER, HIDDEN)
        add(name("ffn_up"), INNER, HIDDEN)
        add(name("ffn_down"), HIDDEN, INNER)
    return write_gguf(path, metadata, tensors)


if __name__ == "__main__":
    print(write_random_model(Path(sys.argv[1]), int(sys.argv[2])), "bytes")
