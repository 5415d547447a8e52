"""Processes that have loaded a model and measure one row whenever they are asked to, so that single turns of several
can alternate.

Run as a script it is such a process: a line of JSON on standard input asks for a row ({"n_prompt": 512, "n_gen": 0,
"n_depth": 0, "n_parallel": 1}), a line on standard output answers. A row is measured once, after a warm-up that does
not count.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
READY_SECONDS, TURN_SECONDS, END_SECONDS = 600, 1800, 30
MOST_TOKENS = 2048  # of a call of llama.cpp


class LostError(Exception):
    """A contestant's process has ended, or does not answer."""


class Contestant:
    """One such process, or one rank per thread under mpirun. `kind`: ckdist, repacked or as-stored (both llama.cpp)."""

    def __init__(self, kind: str, args, ranks: int = 1):
        self.name = kind
        longest = max([*args.n_prompt, args.n_gen]) + max(args.n_depth)
        command = [
            sys.executable,
            __file__,
            kind,
            args.model,
            str(args.threads // ranks),
            str(longest),
            str(max(args.n_parallel)),
        ]
        if ranks > 1:
            command = [shutil.which("mpirun") or "mpirun", "-n", str(ranks), *command]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, bufsize=0
        )
        self._answer(READY_SECONDS)

    def turn(self, row: dict) -> dict:
        """The row measured once: {"median_ts": tokens/s}, and of ckdist what `ckdist bench` says of it besides.
        LostError where the process is lost.
        """
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(row).encode() + b"\n")
        return self._answer(TURN_SECONDS)

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self, seconds: float) -> dict:
        """The next line that is an answer; others are what libraries print."""
        line, deadline = b"", time.monotonic() + seconds
        while not line.startswith(b"{"):
            ready = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready or not (line := self.process.stdout.readline()):
                raise LostError(self._why_lost(f"did not answer within {seconds:.0f} s" if not ready else "ended"))
        return json.loads(line)

    def _why_lost(self, what: str) -> str:
        """How the process ended, and the last that it said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(5)
            what = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.process.kill()
        self.said.seek(0)
        return " ".join([self.name, what, self.said.read()[-2000:].strip()]).strip()


class IkLlama:
    """ik_llama.cpp by its own programs: a process per turn, which loads the model, warms up and measures a row once.
    One sequence is `llama-bench`'s, several are `llama-batched-bench`'s, which begin behind a prompt of one token.
    """

    def __init__(self, folder: str, args, repack: bool):
        self.folder = pathlib.Path(folder).resolve()
        self.common = ["-m", str(pathlib.Path(args.model).resolve()), "-t", str(args.threads)]
        self.repack = repack

    def turn(self, row: dict) -> dict | None:
        """The row measured once: {"median_ts": tokens/s}. None of what the programs have no row for: a prompt behind
        other tokens.
        """
        if row["n_prompt"] and row["n_depth"]:
            return None
        return {"median_ts": self._several(row) if row["n_parallel"] > 1 else self._one(row)}

    def _one(self, row: dict) -> float:
        work = ["-p", str(row["n_prompt"]), "-n", str(0 if row["n_depth"] else row["n_gen"])]
        work += ["-gp", f"{row['n_depth']},{row['n_gen']}"] * bool(row["n_depth"])
        ran = self._run("llama-bench", "-r", "1", "-o", "json", "-rtr", str(int(self.repack)), *work)
        return json.loads(ran.stdout)[0]["avg_ts"]

    def _several(self, row: dict) -> float:
        prompt, sequences = max(1, row["n_depth"]), row["n_parallel"]
        tokens = sequences * (prompt + row["n_gen"])
        work = ["-c", str(tokens), "-npp", str(prompt), "-ntg", str(row["n_gen"]), "-npl", str(sequences)]
        ran = self._run("llama-batched-bench", *work, *["-rtr"] * self.repack)
        rows = re.findall(rf"\|\s+{prompt} \|\s+{row['n_gen']} \|\s+{sequences} \|(.*)\|", ran.stdout + ran.stderr)
        if len(rows) != 1:
            raise SystemExit(f"llama-batched-bench printed no row: {ran.stderr[-2000:]}")
        return float(rows[0].split("|")[4])

    def _run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """One of the programs, to its end."""
        command = [str(self.folder / program), *self.common, *words]
        try:
            with tempfile.TemporaryDirectory() as empty:  # they leave a log where they run
                limit = READY_SECONDS + TURN_SECONDS
                ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=empty)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"ik_llama.cpp: {error}") from None
        if ran.returncode:
            raise SystemExit(f"{program} ended with code {ran.returncode}: {ran.stderr[-2000:]}")
        return ran

    def end(self) -> None:
        """No process waits."""


class LlamaCpp:
    """llama.cpp in this process: a context for `sequences` sequences of `length` tokens."""

    def __init__(self, model: str, threads: int, length: int, sequences: int, repack: bool):
        import llama_cpp as ll

        self.ll = ll
        self.quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self.quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        settings = ll.llama_model_default_params()
        settings.use_extra_bufts = repack
        self.model = ll.llama_model_load_from_file(model.encode(), settings)
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = (length + 16) * sequences, MOST_TOKENS, 512
        params.n_seq_max = sequences
        params.kv_unified = False
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(MOST_TOKENS, 0, sequences)

    def feed(self, count: int, position: int, sequences: range) -> None:
        """`count` tokens for each of `sequences`, from `position` on; logits of the last of each."""
        most = MOST_TOKENS // len(sequences)
        for begin in range(0, count, most):
            part = min(most, count - begin)
            batch, n = self.batch, 0
            for s in sequences:
                for i in range(part):
                    batch.token[n] = ((position + begin + i) * 7919 + s * 13 + 13) % self.vocab
                    batch.pos[n] = position + begin + i
                    batch.n_seq_id[n] = 1
                    batch.seq_id[n][0] = s
                    batch.logits[n] = begin + i == count - 1
                    n += 1
            batch.n_tokens = n
            if self.ll.llama_decode(self.context, batch):
                raise SystemExit("llama.cpp could not decode")

    def measure(self, row: dict) -> dict:
        sequences, depth = row["n_parallel"], row["n_depth"]
        calls, count = (1, row["n_prompt"]) if row["n_prompt"] else (row["n_gen"], 1)
        memory = self.ll.llama_get_memory(self.context)
        self.ll.llama_memory_clear(memory, True)
        for s in range(sequences if depth else 0):
            self.feed(depth, 0, range(s, s + 1))
        for warm in (True, False):
            for s in range(sequences):
                self.ll.llama_memory_seq_rm(memory, s, depth, -1)
            begin, made = time.perf_counter(), min(calls, 8) if warm else calls
            for i in range(made):
                self.feed(count, depth + i * count, range(sequences))
        return {"median_ts": calls * count * sequences / (time.perf_counter() - begin)}


def serve_llama_cpp(model: str, threads: int, length: int, repack: bool) -> None:
    contexts: dict[int, LlamaCpp] = {}  # the one that is in use, by its sequences
    answer({})
    for line in sys.stdin:
        row = json.loads(line)
        sequences = row["n_parallel"]
        if sequences not in contexts:
            contexts.clear()
            contexts[sequences] = LlamaCpp(model, threads, length, sequences, repack)
        answer(contexts[sequences].measure(row))


def serve_ckdist(model: str, threads: int, length: int, parallel: int) -> None:
    from ckdist.cli.bench_machine import measure_bounds
    from ckdist.cli.bench_rows import ModelBench
    from ckdist.cli.session import model_session, packed_first
    from ckdist.comm.world import start_world
    from ckdist.config.bench_config import BenchConfig
    from ckdist.progress import ProgressBar
    from ckdist.topology import place

    config = packed_first(BenchConfig(model=model, threads=threads, ctx_size=length, repetitions=1))
    config = dataclasses.replace(config, parallel=max(config.parallel, parallel))
    world = start_world()
    bounds = measure_bounds(world, threads, place(world, threads).cpus)
    with model_session(config, world) as loaded:
        if loaded is None:
            return
        bench = ModelBench(loaded, config, bounds, ProgressBar(0, "row", "measuring", shown=False))
        answer({})
        for line in sys.stdin:
            row = json.loads(line)
            if row["n_prompt"]:
                measured = bench.prompt(row["n_prompt"], row["n_depth"])
            else:
                measured = bench.generate(row["n_gen"], row["n_parallel"], row["n_depth"])
            answer(
                {
                    key: measured[key]
                    for key in ("median_ts", "bound", "bound_fraction", "read_bandwidth", "exchange_share")
                }
            )


def answer(measured: dict) -> None:
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("ckdist", "repacked", "as-stored"))
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("length", type=int, help="tokens of the longest sequence")
    parser.add_argument("parallel", type=int, help="most sequences")
    given = parser.parse_args()
    if given.kind == "ckdist":
        serve_ckdist(given.model, given.threads, given.length, given.parallel)
    else:
        serve_llama_cpp(given.model, given.threads, given.length, given.kind == "repacked")
