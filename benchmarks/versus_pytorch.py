"""ckdist's loss and gradients beside PyTorch's, the same Llama, batch and type of products, by turns in one run: tokens/s and ratios.

    python benchmarks/versus_pytorch.py [--model 15m|110m] [--dtype bfloat16|float32] [--threads 2] [--rounds 9] [--compile]
                                        [--pytorch-python PATH]

A step is forward and backward, gradients cleared before; the optimizer is not in it. PyTorch has autocast for bfloat16 and its fused
attention; --compile adds torch.compile. Each side is a process of its own, so that its memory can be told; only one computes at a
time. Printed are medians, the fraction of the best arithmetic rate that was measured in the same run (6 operations per parameter and
token, as is usual, so attention is work without credit), and the processes' largest resident sets.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

MODELS = {  # layers, hidden, intermediate, vocabulary, sequence length, sequences
    "15m": (6, 384, 1024, 4096, 256, 8),
    "110m": (12, 768, 2048, 32000, 512, 2),
}
HEAD_DIM, EPS = 64, 1e-6


def ckdist_step(model, dtype: str, threads: int):
    """(step() -> loss, parameters)."""
    import numpy as np

    from ckdist.models.spec import ModelSpec, RopeSpec
    from ckdist.train.batch import PackedBatch
    from ckdist.train.executable import TrainingExecutable

    layers, hidden, intermediate, vocab, length, sequences = model
    rope = RopeSpec((1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32))
    heads = hidden // HEAD_DIM
    spec = ModelSpec("llama", vocab, hidden, intermediate, layers, heads, heads, HEAD_DIM, EPS, length, rope, attention_scale=HEAD_DIM**-0.5)
    rng, tokens = np.random.default_rng(0), length * sequences
    executable = TrainingExecutable(spec, tokens, lambda name: 1.0, dtype=dtype, threads=threads)
    for name, w in executable.parameters.items():
        if w.ndim == 2:
            w[:] = 0.02 * rng.standard_normal(w.shape, np.float32)
    ids = rng.integers(0, vocab, tokens + 1).astype(np.int32)
    batch = PackedBatch(ids[:-1], ids[1:], np.arange(0, tokens + 1, length, dtype=np.int32))

    def step() -> float:
        executable.zero_grad()
        return executable.forward_backward(batch) / tokens

    return step, executable.parameter_arena.size


def pytorch_step(model, dtype: str, threads: int, compiled: bool):
    """(step() -> loss, parameters)."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers, hidden, intermediate, vocab, length, sequences = model
    heads = hidden // HEAD_DIM
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)  # (length, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):  # (sequences, heads, length, head_dim)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda n, m: nn.Linear(n, m, bias=False)
            self.norm1, self.norm2 = nn.RMSNorm(hidden, EPS), nn.RMSNorm(hidden, EPS)
            self.qkv, self.o = linear(hidden, 3 * hidden), linear(hidden, hidden)
            self.gate_up, self.down = linear(hidden, 2 * intermediate), linear(intermediate, hidden)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).view(sequences, length, 3, heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(sequences, length, hidden))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(vocab, hidden), nn.RMSNorm(hidden, EPS), nn.Linear(hidden, vocab, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))

        def forward(self, ids, targets):
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).float().view(-1, vocab), targets.reshape(-1))

    llama = Llama()
    for p in llama.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.02)
    run = torch.compile(llama) if compiled else llama
    ids = torch.randint(0, vocab, (sequences, length + 1))

    def step() -> float:
        llama.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return loss.item()

    return step, sum(p.numel() for p in llama.parameters())


def work(side: str, model: str, dtype: str, threads: int, compiled: bool) -> None:
    """A side: one step for every line of the standard input."""
    shape = MODELS[model]
    step, parameters = ckdist_step(shape, dtype, threads) if side == "ckdist" else pytorch_step(shape, dtype, threads, compiled)
    step()
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "parameters": parameters, "mib": peak}), flush=True)


def arithmetic_rate(dtype: str, threads: int) -> float:
    """Operations per second of the CPUs in products of this type."""
    from ckdist import native

    out = native.ffi.new("double *")
    native.check(native.lib.ckdist_arithmetic_rate(threads, native.ffi.NULL, int(dtype == "bfloat16"), 0.05, 4, out))
    return out[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="15m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pytorch-python", default=sys.executable, help="the Python that has PyTorch")
    parser.add_argument("--side", choices=["ckdist", "pytorch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return work(options.side, options.model, options.dtype, options.threads, options.compile)
    given = ["--model", options.model, "--dtype", options.dtype, "--threads", str(options.threads), *["--compile"] * options.compile]
    pythons = {"ckdist": sys.executable, "pytorch": options.pytorch_python}
    sides = {
        side: subprocess.Popen([python, __file__, "--side", side, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side, python in pythons.items()
    }
    results: dict[str, list] = {side: [] for side in sides}
    rates = []
    try:
        for r in range(options.rounds + 1):
            rates.append(arithmetic_rate(options.dtype, options.threads))
            for side, process in sides.items():
                process.stdin.write("\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise SystemExit(f"{side} ended early: {pythons[side]}")
                if r:  # the first round warms up
                    results[side].append(json.loads(line))
    finally:
        for process in sides.values():
            process.stdin.close()
            process.wait(30)
    _, _, _, _, length, sequences = MODELS[options.model]
    tokens, rate = length * sequences, max(rates)
    speeds = {side: tokens / statistics.median(r["seconds"] for r in rows) for side, rows in results.items()}
    print(f"{options.model}, {options.dtype}, {options.threads} threads{', compiled' * options.compile}; arithmetic rate {rate / 1e9:.0f} GFLOP/s")
    for side, rows in results.items():
        share = 6 * rows[0]["parameters"] * speeds[side] / rate
        print(f"{side:8} {speeds[side]:8.0f} tokens/s  {100 * share:5.1f} % of the rate  {rows[-1]['mib']:6.0f} MiB  loss {rows[-1]['loss']:.4f}")
    ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(results["ckdist"], results["pytorch"]))
    print(f"ckdist / pytorch: {ratio:.2f}")


if __name__ == "__main__":
    main()
