"""Training steps of ckdist beside PyTorch's, the same Llama, batch and type of products, by turns in one run: tokens/s,
ratios, memory.

    python benchmarks/versus_pytorch.py [--model 15m|110m] [--dtype bfloat16|float32] [--rounds 9]
        [--sides ckdist:1x2,compiled:1x2,compiled@float32:1x2,...] [--levels avx2,avx512,...] [--pytorch-python PATH]

A side is ckdist, eager or compiled (PyTorch, with torch.compile in the latter), and ranks x threads: 1x2 is one process
of two threads, 2x1 two processes of one thread, which split the batch and sum the gradients: PyTorch by DDP over gloo.
`@float32` or `@bfloat16` is the type of one side's products. A step is forward, backward and AdamW (PyTorch's is its
fused one); PyTorch has autocast for bfloat16 and its fused attention. Every process starts once; one side at a time
computes. The first rounds compile, pack and warm up; `--rounds 0` does nothing else, and fills the compiler's cache for
the next run. `--levels` repeats the run with both restricted to the instructions of each level.

Printed are medians, each side's fraction of the best arithmetic rate that was measured in the same run (by 6 operations
per parameter and token, as is usual, so attention is work without credit), and the largest resident set of its
processes from the warm-up on. Of sides with one thread the ratio of CPU seconds is printed too: on a busy machine it
tells more, as it leaves out what other programs take.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

MODELS = {  # layers, hidden, intermediate, vocabulary, sequence length, sequences
    "15m": (6, 384, 1024, 4096, 256, 8),
    "110m": (12, 768, 2048, 32000, 512, 2),
}
SIDES = ("ckdist", "eager", "compiled")
DTYPES = ("bfloat16", "float32")
HEAD_DIM, EPS, RATE, DECAY = 64, 1e-6, 1e-4, 0.01
WARM_UP = 2
LEVELS = {  # of instructions: oneDNN's name, MKL's, and the newest CPU without more as compilers call it
    "avx2": ("AVX2", "AVX2", "haswell"),
    "avx2_vnni": ("AVX2_VNNI", "AVX2", "alderlake"),
    "avx512": ("AVX512_CORE", "AVX512", "skylake-avx512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "AVX512_E1", "cascadelake"),
    "avx512_bf16": ("AVX512_CORE_BF16", "AVX512_E3", "cooperlake"),
}


def restricted(level: str) -> dict[str, str]:
    """The environment in which ckdist and PyTorch use no instruction beyond those of a level."""
    if not level:
        return {}
    onednn, mkl, cpu = LEVELS[level]
    return {
        "CKDIST_ISA": level,
        "ATEN_CPU_CAPABILITY": level.split("_", maxsplit=1)[0],
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "TORCHINDUCTOR_CPP_MARCH": cpu,
    }


def cpu_name() -> str:
    first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    value = {key.strip(): text.strip() for key, text in (line.split(":", 1) for line in first.splitlines())}
    return f"{value.get('model name', 'CPU')} (family {value.get('cpu family', '?')} model {value.get('model', '?')})"


def ckdist_step(model, dtype: str, ranks: int, threads: int):
    """(step() -> loss, parameters, waited() -> seconds of the last step that went to other ranks)."""
    import numpy as np

    from ckdist.comm.communicator import open_communicator
    from ckdist.comm.world import SingleWorld, start_world
    from ckdist.mesh import Mesh
    from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, RopeSpec
    from ckdist.program.pool import ThreadPool
    from ckdist.topology.placement import place
    from ckdist.train.batch import PackedBatch
    from ckdist.train.loss_program import lower_model
    from ckdist.train.native_executable import NativeExecutable
    from ckdist.train.optimizer import Optimizer
    from ckdist.train.ranks import TrainingRanks

    layers, hidden, intermediate, vocab, length, sequences = model
    rope = RopeSpec((1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32))
    heads = hidden // HEAD_DIM
    attention = Attention(heads, heads, HEAD_DIM, HEAD_DIM**-0.5)
    layer = LayerSpec(attention, ffn=DenseFfn(intermediate))
    spec = ModelSpec("llama", vocab, hidden, (layer,) * layers, {"global": rope}, EPS, length)
    world = start_world() if ranks > 1 else SingleWorld()
    pool = ThreadPool(threads, place(world, threads).cpus)
    parameters = 2 * vocab * hidden + layers * (4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden) + hidden
    communicator = open_communicator(world, arena_bytes=8 * parameters + (64 << 20)) if ranks > 1 else None
    tokens = length * sequences // ranks
    rng = np.random.default_rng(0)
    mesh = Mesh.of_job(ranks, world.rank)
    program, meeting = lower_model(spec, tokens, dtype, mesh), TrainingRanks.split(mesh, communicator)
    shapes = program.shards.whole_shapes
    load = lambda name: np.full(shapes[name], 1.0 if name.endswith("norm.weight") else 0.02, np.float32)
    executable = NativeExecutable(program, load, pool, meeting)
    for w in executable.parameters.values():
        if w.ndim == 2:
            w *= rng.standard_normal(w.shape, np.float32)
    config = SimpleNamespace(
        optim="adamw",
        weight_decay=DECAY,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=0,
        zero_stage=0,
    )
    optimizer = Optimizer(config, executable.parameters, executable.gradients, meeting, pool)
    ids = np.random.default_rng(world.rank).integers(0, vocab, tokens + 1).astype(np.int32)
    batch = PackedBatch(ids[:-1], ids[1:], np.arange(0, tokens + 1, length, dtype=np.int32))

    def step() -> float:
        executable.zero_grad()
        loss = executable.forward_backward(batch)
        optimizer.step(RATE, tokens * ranks)
        return loss / tokens

    return step, parameters, lambda: executable.times()["reduce_gradients"]


def pytorch_step(model, dtype: str, ranks: int, threads: int, compiled: bool):
    """(step() -> loss, parameters, None)."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers, hidden, intermediate, vocab, length, sequences = model
    sequences //= ranks
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
            self.table, self.norm, self.head = (
                nn.Embedding(vocab, hidden),
                nn.RMSNorm(hidden, EPS),
                nn.Linear(hidden, vocab, bias=False),
            )
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
    optimizer = torch.optim.AdamW(llama.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    run = llama
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        run = nn.parallel.DistributedDataParallel(run)
    if compiled:
        run = torch.compile(run)
    ids = torch.randint(0, vocab, (sequences, length + 1))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, sum(p.numel() for p in llama.parameters()), lambda: None


def peak_mib() -> float:
    """The largest resident set since it was last reset."""
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def work(name: str, ranks: int, threads: int, model: str, dtype: str) -> None:
    """One process of a side: one step for every line of the standard input."""
    shape = MODELS[model]
    if name == "ckdist":
        step, parameters, waited = ckdist_step(shape, dtype, ranks, threads)
    else:
        step, parameters, waited = pytorch_step(shape, dtype, ranks, threads, name == "compiled")
    for number, _ in enumerate(sys.stdin):
        if number == WARM_UP:
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the largest resident set
        begin, cpu = time.perf_counter(), time.process_time()
        loss = step()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        row = {
            "seconds": seconds,
            "cpu": cpu,
            "loss": loss,
            "parameters": parameters,
            "mib": peak_mib(),
            "waited": waited(),
        }
        print(json.dumps(row), flush=True)


class Side:
    """The processes of one side."""

    def __init__(self, text: str, options, level: str, secret: str):
        self.text = text
        name, _, grid = text.partition(":")
        self.name, _, dtype = name.partition("@")
        ranks, _, threads = grid.partition("x")
        self.dtype = dtype or options.dtype
        if self.name not in SIDES or self.dtype not in DTYPES or not ranks.isdigit() or not threads.isdigit():
            names = f"{', '.join(SIDES)} [@{' or @'.join(DTYPES)}]"
            raise SystemExit(f"a side is {names} : RANKSxTHREADS, as in ckdist:1x2; not {text!r}")
        self.threads = int(threads)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        python = sys.executable if self.name == "ckdist" else options.pytorch_python
        command = [python, __file__, "--work", text, "--model", options.model, "--dtype", self.dtype]
        world = {
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": threads,
            "CKDIST_JOB_SECRET_FILE": secret,
        }
        environment = {**os.environ, **restricted(level), **world}
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
            )
            for r in range(int(ranks))
        ]
        self.rows: list[dict] = []

    def step(self) -> dict:
        """One step; the seconds and the memory of the rank that has most."""
        for p in self.processes:
            p.stdin.write("\n")
            p.stdin.flush()
        lines = [p.stdout.readline() for p in self.processes]
        if not all(lines):
            raise SystemExit(f"{self.text} ended early: {self.processes[0].args[0]}")
        rows = [json.loads(line) for line in lines]
        most = {key: max(row[key] for row in rows) for key in ("seconds", "cpu", "mib", "parameters", "loss")}
        return most | {"waited": rows[0]["waited"] and statistics.mean(row["waited"] for row in rows)}

    def end(self) -> None:
        for p in self.processes:
            p.stdin.close()
        for p in self.processes:
            try:
                p.wait(20)
            except subprocess.TimeoutExpired:
                p.kill()

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)


def arithmetic_rate(dtype: str, threads: int, level: str) -> float:
    """Operations per second of the CPUs in products of this type, in a process of its own: a level is chosen once."""
    bf16 = int(dtype == "bfloat16")
    code = f"from ckdist.topology.arithmetic import arithmetic_rate as rate; print(rate({threads}, (), {bf16}))"
    environment = {**os.environ, **restricted(level)}
    return float(
        subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    )


def ratio(first: Side, side: Side) -> str:
    of = lambda key: statistics.median(b[key] / a[key] for a, b in zip(first.rows, side.rows, strict=True))
    alone = all(len(s.processes) * s.threads == 1 for s in (first, side))
    seconds = f"{of('seconds'):.2f}" + (f" ({of('cpu'):.2f} in CPU seconds)" if alone else "")
    return f"{first.text} / {side.text}: {seconds}, memory {first.rows[-1]['mib'] / side.rows[-1]['mib']:.2f}"


def compare(options, level: str, secret: str) -> None:
    """One run of all sides."""
    sides, rates = [], []
    try:
        for text in options.sides.split(","):
            sides.append(Side(text, options, level, secret))  # noqa: PERF401 - those made so far are ended below
        for number in range(WARM_UP + options.rounds):
            rates.append(arithmetic_rate(options.dtype, max(len(s.processes) * s.threads for s in sides), level))
            for side in sides:
                row = side.step()
                if number >= WARM_UP:
                    side.rows.append(row)
    finally:
        for side in sides:
            side.end()
    if not options.rounds:
        return
    _, _, _, _, length, sequences = MODELS[options.model]
    tokens, rate = length * sequences, max(rates)
    of_level = f", level {level}" if level else ""
    print(
        f"{options.model}, {options.dtype}, {options.rounds} rounds{of_level}; arithmetic rate {rate / 1e9:.0f} "
        f"GFLOP/s; {cpu_name()}"
    )
    for side in sides:
        speed = tokens / side.median("seconds")
        share = 6 * side.rows[0]["parameters"] * speed / rate
        waited = side.rows[0]["waited"] is not None and len(side.processes) > 1
        last = side.rows[-1]
        print(
            f"{side.text:20} {speed:8.0f} tokens/s  {100 * share:5.1f} % of the rate  {last['mib']:6.0f} MiB a process"
            f"  loss {last['loss']:.4f}"
            + (f"  waited {100 * side.median('waited') / side.median('seconds'):.1f} %" if waited else "")
        )
    first = sides[0]
    for side in sides[1:]:
        print(ratio(first, side))
    two = {side.name: side for side in sides if len(side.processes) > 1}
    if {"ckdist", "compiled"} <= set(two):
        print(ratio(two["ckdist"], two["compiled"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="15m")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sides", default="ckdist:1x2,eager:1x2,compiled:1x2,ckdist:2x1,compiled:2x1")
    parser.add_argument("--levels", default="", help=f"of instructions, with commas between them: {', '.join(LEVELS)}")
    parser.add_argument("--pytorch-python", default=sys.executable, help="the Python that has PyTorch")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, _, sizes = options.work.partition(":")
        work(name.partition("@")[0], *map(int, sizes.split("x")), options.model, options.dtype)
        return
    levels = options.levels.split(",")
    if any(level and level not in LEVELS for level in levels):
        raise SystemExit(f"--levels takes {', '.join(LEVELS)}; not {options.levels!r}")
    secret = tempfile.NamedTemporaryFile()  # noqa: SIM115 - of this run's ranks
    secret.write(os.urandom(32))
    secret.flush()
    for level in levels:
        compare(options, level, secret.name)


if __name__ == "__main__":
    main()
