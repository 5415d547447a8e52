"""A long prompt over kill -9 and restart: from disk, and computed again.

    python benchmarks/long_prompt_restart.py [-m smollm2] [--tokens 26000] [-t 2] [--ranks 1] [FLAGS of ckdist serve]

The server starts with an empty --cache-disk, reads the prompt, is killed, and starts again with the folder. Then it
starts with another empty folder. Prints the time to the first token of each, and whether the texts and the
log-probabilities are the same. A model with a shorter context gets a longer one by --override-kv.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator

START_SECONDS = 120.0
ANSWER_TOKENS = 32


@contextlib.contextmanager
def server(words: list[str], folder: str) -> Iterator[int]:
    """Starts a server, yields its port, and kills it with its ranks."""
    command = [sys.executable, "-m", "ckdist.cli.main", "serve", "--port", "0", "--cache-disk", folder, *words]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert job.stdout is not None
    try:
        yield next(
            int(found[1]) for line in job.stdout if (found := re.search(r"serving .* at http://\S+:(\d+)", line))
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def ask(port: int, body: dict) -> tuple[float, str, list[float]]:
    """Returns the seconds until the first token, the text and the log-probabilities."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    begun, first, text, scores = time.monotonic(), 0.0, "", []
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            first = first or time.monotonic() - begun
            text += choice["text"]
            scores += (choice["logprobs"] or {}).get("token_logprobs", [])
    connection.close()
    return first, text, scores


def prompt(port: int, tokens: int) -> list[int]:
    """Returns the first token ids of Python's library."""
    folder, text = pathlib.Path(sysconfig.get_paths()["stdlib"]), ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(errors="replace")
        if len(text) > 8 * tokens:
            break
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/tokenize", json.dumps({"content": text[: 8 * tokens]}))
    return json.loads(connection.getresponse().read())["tokens"][:tokens]


def blocks_on_disk(port: int) -> int:
    """Returns how many blocks the disk has."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    found = re.search(r"^ckdist_disk_blocks (\S+)", connection.getresponse().read().decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def main() -> None:
    """Runs the three starts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=26000)
    arguments, more = parser.parse_known_args()
    context = arguments.tokens + 1024
    longer = [f"--override-kv=llama.context_length=int:{context}"] if arguments.model == "smollm2" else []
    words = ["-m", arguments.model, "-c", str(context), *longer, *more]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        with server(words, folder) as port:
            body = {
                "prompt": prompt(port, arguments.tokens), "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 1,
                "stream": True, "ignore_eos": True,
            }  # fmt: skip
            cold = ask(port, body)
            end = time.monotonic() + START_SECONDS
            while blocks_on_disk(port) < arguments.tokens // 16 and time.monotonic() < end:
                time.sleep(0.2)
        time.sleep(4)  # the HTTP process has heard that its rank is gone
        with server(words, folder) as port:
            loaded = ask(port, body)
        time.sleep(4)
        with server(words, empty) as port:
            again = ask(port, body)
    print(f"{len(body['prompt'])} tokens of {arguments.model}: first token after {cold[0]:.2f} s computed, "
          f"{loaded[0]:.2f} s from disk after kill -9, {again[0]:.2f} s computed again")  # fmt: skip
    print(
        "texts equal:", cold[1] == loaded[1] == again[1], " log-probabilities equal:", cold[2] == loaded[2] == again[2]
    )


if __name__ == "__main__":
    main()
