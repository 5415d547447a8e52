"""Other engines over several hosts, measured as `ckdist bench` measures: one thread a host, a prompt, decode of one
sequence, and of several where they can.
"""

import contextlib
import json
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator

from limited_links import Host

PORT = 29600
SECONDS = 900  # of one program
START_SECONDS = 60


class LlamaCppRpc:
    """llama.cpp's RPC: layers in equal parts, the first host's in its own process, the others' in servers. `folder`
    holds llama-bench, llama-batched-bench and ggml-rpc-server.
    """

    def __init__(self, folder: pathlib.Path, model: str, layers: int):
        self.folder, self.model, self.layers = folder, model, layers

    def rates(self, hosts: list[Host], prompt: int, generated: int, sequences: int) -> list[float | None]:
        """Tokens per second: one sequence, `sequences` of them, a prompt."""
        servers = [
            [str(self.folder / "ggml-rpc-server"), "-H", host.address, "-p", str(PORT), "-t", "1"] for host in hosts
        ]
        remote = self.layers * (len(hosts) - 1) // len(hosts)
        named = ",".join(f"{host.address}:{PORT}" for host in hosts[1:])
        common = ["-m", self.model, "-t", "1", "--rpc", named, "-ngl", str(remote)]
        with workers(hosts[1:], servers[1:]):
            work = ["-p", str(prompt), "-n", str(generated), "-r", "1", "-o", "json"]
            rows = json.loads(output(hosts[0], [str(self.folder / "llama-bench"), *common, *work]))
            alone = {(row["n_prompt"], row["n_gen"]): row["avg_ts"] for row in rows}
            tokens = sequences * (1 + generated)
            work = ["-c", str(tokens), "-npp", "1", "-ntg", str(generated), "-npl", str(sequences)]
            said = output(hosts[0], [str(self.folder / "llama-batched-bench"), *common, *work])
        several = re.search(rf"\|\s+1 \|\s+{generated} \|\s+{sequences} \|(.*)\|", said)
        if several is None:
            raise SystemExit(f"llama-batched-bench printed no row: {said[-300:]}")
        return [alone[0, generated], float(several[1].split("|")[4]), alone[prompt, 0]]


class DistributedLlama:
    """distributed-llama: tensors over two, four or more hosts, values between them in Q80. `model` and `tokenizer` are
    in its own format; it decodes one sequence.
    """

    def __init__(self, program: pathlib.Path, model: str, tokenizer: str):
        self.program, self.model, self.tokenizer = program, model, tokenizer

    def rates(self, hosts: list[Host], prompt: int, generated: int, sequences: int) -> list[float | None]:
        """Tokens per second: one sequence (behind 16 tokens), None, a prompt. None alone where it refuses so many
        hosts.
        """
        del sequences
        if len(hosts) & (len(hosts) - 1):
            return [None, None, None]
        servers = [[str(self.program), "worker", "--port", str(PORT), "--nthreads", "1"]] * len(hosts)
        found = []
        for tokens, steps, row in ((16, 16 + generated, "Prediction"), (prompt, prompt, "Evaluation")):
            with workers(hosts[1:], servers[1:]):
                words = ["inference", "--prompt", tokens * "a", "--steps", str(steps + 1), "--nthreads", "1"]
                words += ["--model", self.model, "--tokenizer", self.tokenizer, "--buffer-float-type", "q80"]
                words += ["--max-seq-len", "2304", "--workers", *(f"{host.address}:{PORT}" for host in hosts[1:])]
                said = output(hosts[0], [str(self.program), *words])
            rate = re.search(rf"{row}\n.*?tokens/s: ([\d.]+)", said, re.DOTALL)
            if rate is None:
                raise SystemExit(f"distributed-llama printed no rate: {said[-300:]}")
            found.append(float(rate[1]))
        return [found[0], None, found[1]]


@contextlib.contextmanager
def workers(hosts: list[Host], commands: list[list[str]]) -> Iterator[None]:
    """A server on each host while the `with` lasts; it begins when all of them listen."""
    started = [
        subprocess.Popen(
            host.command(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for host, words in zip(hosts, commands, strict=True)
    ]
    try:
        for host in hosts:
            wait_listening(host)
        yield
    finally:
        for server in started:
            server.kill()
            server.wait()


def wait_listening(host: Host) -> None:
    """Until a socket of the host listens at PORT."""
    deadline = time.monotonic() + START_SECONDS
    listening = ["ip", "netns", "exec", host.name, "cat", "/proc/net/tcp"]
    while (
        f":{PORT:04X} 00000000:0000 0A"
        not in subprocess.run(listening, capture_output=True, text=True, timeout=20, check=True).stdout
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"no server listens at port {PORT} of {host.name} after {START_SECONDS} s")
        time.sleep(0.1)


def output(host: Host, words: list[str]) -> str:
    """What a program prints, to its end."""
    with tempfile.TemporaryDirectory() as empty:  # some leave a log where they run
        ran = subprocess.run(
            host.command(words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, cwd=empty
        )
    if ran.returncode:
        raise SystemExit(f"{words[0]} ended with code {ran.returncode}: {ran.stderr.strip()[-300:]}")
    return ran.stdout
