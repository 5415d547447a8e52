"""Two layers of Kimi-K2's width with random weights, one dense and one with experts: the time of a decode step and of a
prompt for each, the bytes that a token reads, and their share of the measured bandwidth.

    python benchmarks/wide_layers.py FILE.gguf [--experts 384] [-t 2] [-p 512] [-n 64]

FILE.gguf is made where it is not there: hidden 7168, latent attention of 64 heads, an intermediate size of 18432 in the
dense layer, experts of 2048 of which a token takes 8, and one that every token takes, in Q4_K; with 384 experts it has
10 GB. Fewer experts take less memory; a token reads as many bytes. The last lines are what 61 such layers would give
where a socket reads 614 GB/s, by bytes alone.
"""

import argparse
import pathlib
import statistics
import time

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.program.executable import DECODE
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots
from ckdist.topology.bandwidth import read_bandwidth
from ckdist.weights import dtypes
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf

HIDDEN, DENSE, EXPERT, USED, LAYERS = 7168, 18432, 2048, 8, 61
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 64, 1536, 512, 128, 64, 128
VOCAB = 512
# Weights and bytes of a block, and the float16 numbers that it begins with: Q4_K's are of scales and of minima.
BLOCKS = {dtypes.Q4_K: (256, 144, (1e-4, 7.5e-4)), dtypes.Q8_0: (32, 34, (2.7e-4,))}
SOCKET, PAPER = 614e9, 12.94  # bytes/s of the paper's socket, and its tokens/s


def random_blocks(rng: np.random.Generator, kind: dtypes.TensorType, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of so many weights of about 0.02: a block's codes are random, its scales plausible."""
    count = int(np.prod(shape))
    if kind is dtypes.F32:
        return (rng.standard_normal(count, np.float32) * 0.02).view(np.uint8)
    block, size, scales = BLOCKS[kind]
    found = np.frombuffer(rng.bytes(count // block * size), np.uint8).reshape(-1, size).copy()
    found[:, : 2 * len(scales)] = np.array(scales, np.float16).view(np.uint8)
    return found


def write(path: pathlib.Path, experts: int) -> None:
    """The file, tensor by tensor."""
    rng, tensors = np.random.default_rng(1), []

    def add(name: str, *shape: int, kind: dtypes.TensorType = dtypes.Q4_K) -> None:
        make = lambda: np.ones(shape, np.float32).view(np.uint8) if "norm" in name else random_blocks(rng, kind, shape)
        tensors.append(GgufTensorToWrite(name, kind, shape, make))

    add("token_embd.weight", VOCAB, HIDDEN, kind=dtypes.F32)
    add("output.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN, kind=dtypes.F32)
    for layer in range(2):
        at = f"blk.{layer}"
        add(f"{at}.attn_norm.weight", HIDDEN, kind=dtypes.F32)
        add(f"{at}.ffn_norm.weight", HIDDEN, kind=dtypes.F32)
        add(f"{at}.attn_q_a.weight", Q_RANK, HIDDEN)
        add(f"{at}.attn_q_a_norm.weight", Q_RANK, kind=dtypes.F32)
        add(f"{at}.attn_q_b.weight", HEADS * (NOPE + ROPE), Q_RANK)
        add(f"{at}.attn_kv_a_mqa.weight", KV_RANK + ROPE, HIDDEN)
        add(f"{at}.attn_kv_a_norm.weight", KV_RANK, kind=dtypes.F32)
        add(f"{at}.attn_k_b.weight", HEADS, KV_RANK, NOPE, kind=dtypes.Q8_0)  # rows shorter than a block of Q4_K
        add(f"{at}.attn_v_b.weight", HEADS, VALUE, KV_RANK)
        add(f"{at}.attn_output.weight", HIDDEN, HEADS * VALUE)
    for part, shape in (("gate", (DENSE, HIDDEN)), ("up", (DENSE, HIDDEN)), ("down", (HIDDEN, DENSE))):
        add(f"blk.0.ffn_{part}.weight", *shape)
    add("blk.1.ffn_gate_inp.weight", experts, HIDDEN, kind=dtypes.F32)
    add("blk.1.exp_probs_b.bias", experts, kind=dtypes.F32)
    for part, shape in (("gate", (EXPERT, HIDDEN)), ("up", (EXPERT, HIDDEN)), ("down", (HIDDEN, EXPERT))):
        add(f"blk.1.ffn_{part}_exps.weight", experts, *shape)
        add(f"blk.1.ffn_{part}_shexp.weight", *shape)
    numbers = {
        "block_count": 2, "context_length": 4096, "embedding_length": HIDDEN, "feed_forward_length": DENSE,
        "attention.head_count": HEADS, "attention.head_count_kv": 1, "attention.key_length": KV_RANK + ROPE,
        "attention.value_length": KV_RANK, "attention.key_length_mla": NOPE + ROPE,
        "attention.value_length_mla": VALUE, "attention.q_lora_rank": Q_RANK, "attention.kv_lora_rank": KV_RANK,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e4, "rope.dimension_count": ROPE,
        "vocab_size": VOCAB, "leading_dense_block_count": 1, "expert_count": experts,
        "expert_used_count": USED, "expert_shared_count": 1, "expert_feed_forward_length": EXPERT,
        "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.827,
    }  # fmt: skip
    metadata = {"general.architecture": "deepseek2"} | {f"deepseek2.{name}": value for name, value in numbers.items()}
    temporary = path.with_suffix(".tmp")
    write_gguf(temporary, metadata, tensors)
    temporary.replace(path)


def layer_bytes(model, layer: int) -> int:
    """That a token reads of a layer's matrices, as they are packed."""
    total = 0
    for name, source in model.checkpoint.tensors.items():
        if f"layers.{layer}." in name and len(source.shape) > 1:
            part = USED / source.shape[0] if "experts" in name and len(source.shape) > 2 else 1
            total += int(source.nbytes * part)
    return total


def times(model, ids: np.ndarray, rounds: int) -> tuple[float, float]:
    """Median seconds of a step of the first layer, and of all: of so many tokens at once."""
    first, both = [], []
    executable = model.executable
    blocks = np.arange(-(-len(ids) // BLOCK_TOKENS), dtype=np.int32)
    for r in range(rounds):
        own = np.roll(ids, 7 * r).astype(np.int32)
        chunks = np.array([[len(ids), 0, len(blocks)]], np.int32)
        every = np.arange(len(ids), dtype=np.int32)  # or the last layer computes one row
        batch = Batch(own, chunks, blocks, every, own_slots(executable.state_slots, range(1), 0))
        begin = time.perf_counter()
        executable.run_layer(batch, DECODE)
        middle = time.perf_counter()
        executable.run(batch)
        first.append(middle - begin)
        both.append(time.perf_counter() - middle)
    return statistics.median(first), statistics.median(both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--steps", type=int, default=64)
    args = parser.parse_args()
    if not args.file.exists():
        write(args.file, args.experts)
    config = EngineConfig(
        model=str(args.file), threads=args.threads, ctx_size=1024, parallel=1, repack="off", ubatch_size=args.prompt
    )
    model = load_model(config, SingleWorld())
    rng, rates = np.random.default_rng(0), []
    dense, both = [], []
    for _ in range(args.steps // 8):
        rates.append(read_bandwidth(args.threads))
        one = times(model, rng.integers(0, VOCAB, 1), 8)
        dense.append(one[0]), both.append(one[1])
    rate, dense_s = max(rates), min(dense)
    experts_s = min(both) - dense_s
    for name, layer, seconds in (("dense", 0, dense_s), ("experts", 1, experts_s)):
        count = layer_bytes(model, layer)
        share = f"{100 * count / seconds / rate:.0f} % of {rate / 1e9:.1f} GB/s"
        print(f"{name:8s} decode {1e3 * seconds:.2f} ms a layer, {count / 1e6:.0f} MB, {share}")
    ids = rng.integers(0, VOCAB, args.prompt)
    SingleSequence(model.executable).feed(ids, outputs="none")
    first, all_layers = times(model, ids, 3)
    print(f"dense    prompt of {args.prompt}: {1e3 * first:.1f} ms a layer")
    print(f"experts  prompt of {args.prompt}: {1e3 * (all_layers - first):.1f} ms a layer")
    token = layer_bytes(model, 0) + (LAYERS - 1) * layer_bytes(model, 1)
    share = layer_bytes(model, 1) / experts_s / rate
    print(f"{LAYERS} layers read {token / 1e9:.2f} GB a token: {SOCKET * share / token:.1f} tokens/s at this share of")
    print(f"{SOCKET / 1e9:.0f} GB/s; the paper has {PAPER}")
    model.close()


if __name__ == "__main__":
    main()
