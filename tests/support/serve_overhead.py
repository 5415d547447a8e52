"""What the HTTP path costs: `python -m tests.support.serve_overhead` prints tokens/s and the HTTP process's CPU time
per token.

Rank 0 is the fake one, in a process of its own and as fast as it can be; clients read raw server-sent events. Streams
of one token per message, so what is measured is tokenless work: messages, detokenisation, JSON, HTTP.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ckdist.config.serve_config import ServeConfig
from ckdist.serve.addresses import listen
from ckdist.serve.process import HttpProcess
from tests.support.served import VOCAB, wait_for, write_tokenizer

TOKENS = 5000
ENGINE = """
import sys
from tests.support.fake_engine import FakeEngine
engine = FakeEngine(sys.argv[1], int(sys.argv[2]), 1 << 20)
engine.__enter__()
engine.delay = float(sys.argv[3])
sys.stdin.read()
"""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_stream(port: int, tokens: int, found: list[int]) -> None:
    body = b'{"prompt":"hello there ","max_tokens":%d,"stream":true}' % tokens
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        data = bytearray()
        while part := connection.recv(1 << 20):
            data += part
    found.append(data.count(b"data: {"))


def measure(port: int, pid: int, streams: int) -> str:
    chunks: list[int] = []
    threads = [threading.Thread(target=read_stream, args=(port, TOKENS, chunks)) for _ in range(streams)]
    cpu, wall = cpu_seconds(pid), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu, wall, tokens = cpu_seconds(pid) - cpu, time.monotonic() - wall, TOKENS * streams
    each = f"{1e6 * cpu / tokens:.0f} us of CPU per token, {tokens / sum(chunks):.1f} tokens per event"
    return f"{streams} streams: {tokens / wall:.0f} tokens/s, {each}"


def main() -> None:
    delay = sys.argv[1] if len(sys.argv) > 1 else "0"
    with tempfile.TemporaryDirectory() as name:
        folder, endpoint = write_tokenizer(Path(name)), f"ipc://{name}/engine"
        engine = subprocess.Popen([sys.executable, "-c", ENGINE, endpoint, str(VOCAB), delay], stdin=subprocess.PIPE)
        http = HttpProcess.start(ServeConfig(port=0), endpoint, str(folder), "bytes", listen("127.0.0.1", 0))
        port = int(http.url.rpartition(":")[2])
        try:
            wait_for(lambda: b" 200 " in ask(port))
            for streams in (1, 8):
                print(measure(port, http.pid, streams))
        finally:
            engine.kill()
            http.stop()


def ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        return connection.recv(4096)


main()
