"""One wide layer with random weights at long contexts, for each type of the cache: decode at 1,024 and 32,768 tokens,
and a chunk of a prompt that ends at 2,048 and at 32,768.

    python benchmarks/long_contexts.py FILE.gguf [--types i16 q8_0 q4_0] [-t 1] [--hidden 4096]

FILE.gguf is made if it is not there: Q4_K, heads of 128, a kv-head for four heads, an intermediate size of 3.5 times
the hidden one. Times are CPU seconds of the process, the least of alternating rounds, so that a busy machine changes
them little with one thread. A step that wants no logits ends after attention, so filling the cache is cheaper.

For decode, the bytes allow weights + cache at 1,024 over weights + cache at 32,768. For prompts, two rates show why a
long context is slower: that of the products with weights, and that of the operations that attention adds.
"""

import argparse
import pathlib
import time

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.program.cache import block_bytes
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots
from ckdist.weights import dtypes
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf

VOCAB, HEAD, GROUP, LONG, PIECE = 512, 128, 4, 32768, 256
DECODE_AT, PROMPT_AT = (1024, LONG), (2048, LONG)  # tokens of context, with the step's own
SCALES = (1e-4, 7.5e-4)  # the two float16 numbers at the start of a block of Q4_K


def random_blocks(rng: np.random.Generator, kind: dtypes.TensorType, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of random numbers of about 0.02, in F32 or Q4_K."""
    count = int(np.prod(shape))
    if kind is dtypes.F32:
        return (rng.standard_normal(count, np.float32) * 0.02).view(np.uint8)
    size = kind.block_bytes
    found = np.frombuffer(rng.bytes(count // kind.block_elements * size), np.uint8).reshape(-1, size).copy()
    found[:, :4] = np.array(SCALES, np.float16).view(np.uint8)
    return found


def write(path: pathlib.Path, hidden: int) -> None:
    """Writes a Llama of one layer."""
    rng, tensors, inner, kv = np.random.default_rng(1), list[GgufTensorToWrite](), hidden * 7 // 2, hidden // GROUP

    def add(name: str, *shape: int, kind: dtypes.TensorType = dtypes.Q4_K) -> None:
        def make() -> np.ndarray:
            return np.ones(shape, np.float32).view(np.uint8) if "norm" in name else random_blocks(rng, kind, shape)

        tensors.append(GgufTensorToWrite(name, kind, shape, make))

    add("token_embd.weight", VOCAB, hidden, kind=dtypes.F32)
    add("output.weight", VOCAB, hidden)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        add(f"{name}.weight", hidden, kind=dtypes.F32)
    for name, shape in {
        "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }.items():  # fmt: skip
        add(f"blk.0.{name}.weight", *shape)
    numbers = {
        "block_count": 1, "context_length": 1 << 17, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": hidden // HEAD, "attention.head_count_kv": hidden // HEAD // GROUP,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e5, "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
    }  # fmt: skip
    write_gguf(path, {"general.architecture": "llama"} | {f"llama.{name}": n for name, n in numbers.items()}, tensors)


def run(model: Model, tokens: int, end: int, logits: bool = True) -> float:
    """CPU seconds of a step of `tokens` tokens, the last of which is number `end` of the sequence."""
    executable = model.executable
    blocks = np.arange(-(-end // BLOCK_TOKENS), dtype=np.int32)
    ids = np.random.default_rng(end).integers(0, VOCAB, tokens).astype(np.int32)
    chunks = np.array([[tokens, end - tokens, len(blocks)]], np.int32)
    rows = np.arange(tokens if logits else 0, dtype=np.int32)
    batch = Batch(ids, chunks, blocks, rows, own_slots(executable.state_slots, range(1), 0))
    begin = time.process_time()
    executable.run(batch)
    return time.process_time() - begin


def measure(model: Model, rounds: int, types: tuple[str, str]) -> None:
    """Prints both ratios, and those that bytes and operations allow."""
    for end in range(PIECE, LONG + 1, PIECE):
        run(model, PIECE, end, logits=False)
    seconds = {
        (tokens, at): [] for tokens, places in ((1, DECODE_AT), (PIECE, PROMPT_AT)) for at in places
    }  # by tokens of the step and of its context
    for _ in range(rounds):
        for (tokens, at), found in seconds.items():
            found.extend(run(model, tokens, at) for _ in range(12 if tokens == 1 else 1))
    least = {key: min(found) for key, found in seconds.items()}
    weights = sum(s.nbytes for name, s in model.checkpoint.tensors.items() if "embed" not in name)
    each = block_bytes(model.executable.caches.values(), types) / BLOCK_TOKENS
    short, long = (least[1, at] for at in DECODE_AT)
    allowed = (weights + each * DECODE_AT[0]) / (weights + each * LONG)
    print(
        f"{types[0]:5s} decode {1e3 * short:.2f} ms at {DECODE_AT[0]}, {1e3 * long:.2f} ms at {LONG}: "
        f"{100 * short / long:.0f} %; bytes allow {100 * allowed:.0f} % "
        f"({weights / 1e6:.0f} MB of weights, {each * LONG / 1e6:.0f} MB of cache)"
    )
    short, long = (least[PIECE, at] for at in PROMPT_AT)
    heads = max(sum(layer.heads_per_kv) for layer in model.executable.caches.values())
    added = 4.0 * HEAD * heads * PIECE * (PROMPT_AT[1] - PROMPT_AT[0])
    rate = added / (long - short)
    count = sum(np.prod(s.shape) for name, s in model.checkpoint.tensors.items() if "embed" not in name)
    products = 2.0 * count * PIECE / (short - added * PROMPT_AT[0] / (PROMPT_AT[1] - PROMPT_AT[0]) / rate)
    print(
        f"{types[0]:5s} prompts {1e3 * short / PIECE:.3f} ms a token at {PROMPT_AT[0]}, {1e3 * long / PIECE:.3f} ms at "
        f"{LONG}: {100 * short / long:.0f} %; products {products / 1e9:.0f} GOP/s, attention {rate / 1e9:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--types", nargs="+", default=["i16", "q8_0", "q4_0"])
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.file.exists():
        write(args.file, args.hidden)
    for kind in args.types:
        config = EngineConfig(
            model=str(args.file), threads=args.threads, ctx_size=LONG, parallel=1, ubatch_size=PIECE, repack="off",
            cache_type_k=kind, cache_type_v=kind,
        )  # fmt: skip
        model = load_model(config, SingleWorld())
        measure(model, args.rounds, (kind, kind))
        model.close()


if __name__ == "__main__":
    main()
