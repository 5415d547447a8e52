"""`python -m tests.support.hostile_client FOLDER`: a fake rank 0 and a client that sends what takes long, in a
process of its own, so that what the HTTP process' event loop does can be measured without them. Prints one JSON line
per request: name, status, seconds, bytes.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.fake_engine import FakeEngine
from tests.support.served import VOCAB, wait_healthy

MB = 1 << 20
THIRDS = "three texts"
TEXT = "the quick brown fox " * (8 * MB // 20 - 10)


def requests() -> dict[str, tuple[str, dict]]:
    """Requests that hold an event loop for 100 ms to seconds if their work runs on it, and long bodies."""
    return {
        "tokenize with pieces": ("/tokenize", {"content": TEXT[: MB // 4], "with_pieces": True}),
        "tokenize": ("/tokenize", {"content": TEXT[:MB]}),
        "detokenize": ("/detokenize", {"tokens": [100] * (1 << 17)}),
        "token ids": ("/v1/completions", {"prompt": [7] * 2_000_000, "max_tokens": 1}),
        "objects": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "metadata": {"a": [{}] * 1_300_000}}),
        "echo": ("/v1/completions", {"prompt": "ab" * 5000, "max_tokens": 1, "echo": True, "logprobs": 5}),
        "echo streamed": (
            "/v1/completions",
            {"prompt": "ab" * 5000, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True},
        ),
        "long answer": ("/v1/completions", {"prompt": "ab", "max_tokens": 8000, "logprobs": 5, "ignore_eos": True}),
        "text": ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
        # sent three times at once: one turn of the loop may read for all three
        THIRDS: ("/v1/completions", {"prompt": TEXT[: len(TEXT) // 3], "max_tokens": 1}),
    }


def send(url: str, name: str, path: str, body: bytes) -> None:
    begun = time.monotonic()
    answer = httpx.post(url + path, content=body, headers={"content-type": "application/json"}, timeout=120)
    seconds = time.monotonic() - begun
    print(json.dumps([name, answer.status_code, seconds, len(answer.content), answer.text[:200]]), flush=True)


def main() -> None:
    endpoint, url = sys.argv[1:3]
    bodies = {
        name: (path, json.dumps(body, separators=(",", ":")).encode()) for name, (path, body) in requests().items()
    }
    with FakeEngine(endpoint, VOCAB, context_length=1 << 16):
        wait_healthy(url)
        print(json.dumps(["ready", 200, 0, 0, ""]), flush=True)
        thirds = bodies.pop(THIRDS)
        for name, (path, body) in bodies.items():
            send(url, name, path, body)
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(send, url, THIRDS, *thirds) for _ in range(3)]:
                done.result()


if __name__ == "__main__":
    main()
