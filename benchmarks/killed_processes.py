"""kill -9 of each kind of process of a server on two hosts (network namespaces), while it has eight streams.

    python -m benchmarks.random_model /tmp/random.gguf 24      (1.7 GB)
    python -m benchmarks.killed_processes -m /tmp/random.gguf [FLAGS of ckdist serve]

`KINDS="rank 0;rank 1"` in the environment chooses rows by their beginning, and `SETTLE` the seconds
before the first one. `--no-keep-weights` packs the weights again.

Prints for each process if the streams went on, the seconds until the first and the last of them had its next token,
and if all texts are those of an undisturbed run; else how long a new request waited for its first token, or how the
command ended. Needs root, ip and tc.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.limited_links import network

STREAMS, TOKENS, BEFORE = 8, 150, 8  # BEFORE: tokens of a stream before the kill
STEP = 0.5  # seconds of a step at most, on a quiet machine
READY_SECONDS, AGAIN_SECONDS, END_SECONDS = 180.0, 60.0, 30.0
URL = "http://127.0.0.1:8080"
AGENT = Path(__file__).parent.parent / "launch" / "netns-agent"
COMMAND, LINKS = "the command itself", "no process, but all TCP connections between the hosts (`ss -K`)"
KINDS = (
    LINKS,
    *("a text worker", "the HTTP process", "rank 0", "rank 1, on the other host", "the other host's agent"),
    *("the first host's agent", "the launcher of the ranks", COMMAND),
)


class Stream(threading.Thread):
    """One stream: its text, the times of its tokens, and if it was whole."""

    def __init__(self, index: int, tokens: int = TOKENS) -> None:
        super().__init__(daemon=True)
        self.body = {"prompt": f"def f{index}(", "max_tokens": tokens, "temperature": 0.8, "seed": index}
        self.text, self.times, self.whole = "", list[float](), False
        self.start()

    def run(self) -> None:
        """Reads the stream to its end."""
        try:
            body = self.body | {"stream": True, "ignore_eos": True}
            while httpx.get(f"{URL}/health", timeout=60).is_error:  # a text worker is replaced
                time.sleep(0.1)
            with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.text += (json.loads(line[6:]).get("choices") or [{"text": ""}])[0]["text"]
                        self.times.append(time.monotonic())
                    self.whole |= line == "data: [DONE]"
        except httpx.HTTPError:
            pass

    def pause(self, since: float) -> float:
        """Seconds from a kill to the next token. Those of the first STEP seconds may have been computed before it."""
        return next((when for when in self.times if when > since + STEP), since) - since


def started(hosts: list[str], flags: list[str]) -> subprocess.Popen[str]:
    """The server, once it is ready."""
    launch = ["launch", "-n", "2", "--hosts", ",".join(hosts), "--agent", f"{AGENT} {{host}}", "--restarts", "9"]
    words = [sys.executable, "-P", "-m", "ckdist.cli.main", *launch, "ckdist", "serve", "-tp", "2", "-t", "1", *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, ready = list[str](), threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            print(f"    {time.strftime('%X')} {line.strip()[:150]}", file=sys.stderr, flush=True)
            if "serving " in line:
                ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(READY_SECONDS):
        raise SystemExit(f"it does not start: {lines}")
    return process


def find(server: psutil.Process, kind: str, hosts: list[str]) -> psutil.Process:
    """The process of a kind."""
    if kind in (COMMAND, LINKS):
        return server
    for process in server.children(recursive=True):
        words, parent = process.cmdline(), process.parent()
        is_zygote = words[-1:] == ["ckdist.tokens.zygote"]
        is_agent = words[-1:] == ["ckdist.launcher.agent"] and "python" in words[0]
        if {
            "a text worker": is_zygote and parent is not None and parent.cmdline() == words,
            "the HTTP process": words[-1:] == ["ckdist.serve"],
            "rank 0": "serve" in words and process.environ().get("RANK") == "0",
            "rank 1, on the other host": "serve" in words and process.environ().get("RANK") == "1",
            "the first host's agent": is_agent and _host(process) == hosts[0],
            "the other host's agent": is_agent and _host(process) == hosts[1],
            "the launcher of the ranks": "ckdist.cli.child_engine" in words,
        }[kind]:
            return process
    raise SystemExit(f"there is no process for {kind}")


def _host(process: psutil.Process) -> str:
    """The name of the host that a process is on."""
    words = ["ip", "netns", "identify", str(process.pid)]
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def first_address() -> str:
    """This host's address between the hosts."""
    words = ["hostname", "-I"]
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]


def first_token(since: float) -> str:
    """Waits until a new request gets a token."""
    while time.monotonic() < since + AGAIN_SECONDS:
        probe = Stream(99, 1)
        probe.join(AGAIN_SECONDS)
        if probe.times:
            return f"the streams ended; a new request had its first token after {probe.times[0] - since:.1f} s"
        time.sleep(0.05)
    return "the streams ended, and no new request was answered"


def undisturbed() -> list[str]:
    """The texts of all streams."""
    streams = [Stream(index) for index in range(STREAMS)]
    for stream in streams:
        stream.join()
    if not all(stream.whole for stream in streams):
        raise SystemExit("a stream ended without a kill")
    print(f"seconds of {TOKENS} tokens without a kill: {streams[0].times[-1] - streams[0].times[0]:.2f}", flush=True)
    return [stream.text for stream in streams]


def killed(server: "subprocess.Popen[str]", kind: str, hosts: list[str], whole: list[str]) -> str:
    """Kills a process in the middle of the streams. Returns what came of them."""
    process = find(psutil.Process(server.pid), kind, hosts)
    streams = [Stream(index) for index in range(STREAMS)]
    while any(stream.is_alive() and len(stream.times) < BEFORE for stream in streams):
        time.sleep(0.01)
    others = psutil.Process(server.pid).children(recursive=True) if kind == COMMAND else []
    if not all(stream.is_alive() for stream in streams):
        raise SystemExit(f"a stream ended before the kill of {kind}")
    if kind == LINKS:
        others_of = ["ss", "-t", "-K", "dst", f"{first_address()[:-1]}2"]
        subprocess.run(others_of, check=True, capture_output=True, timeout=20)
    else:
        process.kill()
    since = time.monotonic()
    for stream in streams:
        stream.join()
    if all(stream.whole for stream in streams):
        same = "the same texts" if [stream.text for stream in streams] == whole else "OTHER TEXTS"
        pauses = [stream.pause(since) for stream in streams]
        return f"streams went on after {min(pauses):.1f} to {max(pauses):.1f} s, {same}"
    if kind != COMMAND:
        return first_token(since)
    left = psutil.wait_procs(others, END_SECONDS)[1]
    return f"all processes ended after {time.monotonic() - since:.1f} s" if not left else f"{len(left)} processes stay"


def in_first_host(hosts: list[str], flags: list[str]) -> None:
    """Prints the table."""
    server = started(hosts, flags)
    try:
        time.sleep(float(os.environ.get("SETTLE", "30")))  # until all weights are packed
        whole = undisturbed()
        print("| kill -9 of | outcome |\n|---|---|")
        chosen = tuple(os.environ.get("KINDS", "").split(";"))
        for kind in (kind for kind in KINDS if kind.startswith(chosen)):
            print(f"| {kind} | {killed(server, kind, hosts, whole)} |", flush=True)
            time.sleep(3)
    finally:
        server.kill()
        server.wait()


def main(flags: list[str]) -> None:
    """Makes the hosts, and runs this script in the first one."""
    with tempfile.TemporaryDirectory() as name, network(2, 1000) as hosts:
        table = Path(name, "hosts")
        table.write_text("".join(f"{host.address} {host.name}\n" for host in hosts))
        names = ",".join(host.name for host in hosts)
        inside = [sys.executable, "-m", "benchmarks.killed_processes", "--hosts", names, *flags]
        subprocess.run(hosts[0].command(inside), env=os.environ | {"CKDIST_NETNS": str(table)}, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hosts"]:
        in_first_host(sys.argv[2].split(","), sys.argv[3:])
    else:
        main(sys.argv[1:])
