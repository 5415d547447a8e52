"""A rank 0 without a model: a ROUTER in a thread that answers with tokens that follow from the prompt alone.

The output of prompt p is p repeated from its start; token 1 in it ends the sequence with "stop".
"""

import threading
import time
from dataclasses import asdict

import msgpack
import numpy as np
import zmq
from msgspec import Struct, structs

from ckdist.engine import messages
from ckdist.engine.sampling_params import SamplingParams

CONTEXT = 256


class FakeEngine:
    """`state`, `delay` and `at_once` may be changed while it runs; `submitted` and `aborted` hold what it was told.

    `said`: messages that it sends as they are, each once.
    """

    def __init__(self, endpoint: str, vocab_size: int, context_length: int = CONTEXT):
        self.endpoint, self.model = (
            endpoint,
            {
                "context_length": context_length,
                "vocab_size": vocab_size,
                "architecture": "fake",
                "pooling": "mean",
                "sequences": 4,
            },
        )
        self.state, self.error = "ready", None
        self.silent = False
        self.delay = 0.0  # seconds between rounds of tokens
        self.at_once = 1  # tokens of a message
        self.refusal: tuple[int, str] | None = None
        self.submitted: list[dict] = []
        self.groups: list[int] = []  # messages that came together
        self.aborted: list[str] = []
        self.drained = False
        self.said: list[dict] = []
        self.stats: dict = {}
        self.more_stats: dict = {}
        self.ranks: list[dict] = []
        self.watched = 0  # how often it was told that somebody looks
        self._running: dict[str, dict] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FakeEngine":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def running(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(self.endpoint)
        status_at = 0.0
        while not self._ended.is_set():
            if not self.silent and time.monotonic() - status_at > 0.05:
                status_at = time.monotonic()
                self.stats = {
                    "requests_waiting": 3,
                    "blocks": 8,
                    "blocks_used": 2,
                    "preemptions_total": 1,
                    "requests_running": len(self._running),
                    "steps_total": 3,
                    "requests_total": 9,
                    "step_seconds_le_0.5": 2,
                    "step_seconds_sum": 0.4,
                    "step_seconds_count": 2,
                    "prefill_choice_info": 'because "so"\n',
                    **self.more_stats,
                }
                self._send(
                    socket,
                    {
                        "op": "status",
                        "state": self.state,
                        "error": self.error,
                        "model": self.model,
                        "stats": self.stats,
                        "ranks": self.ranks,
                        "clock": status_at,
                    },
                )
            while socket.poll(0 if self._running and not self.silent else 10):
                frames = socket.recv_multipart()[1:]
                self.groups.append(len(frames))
                for frame in frames:
                    self._receive(socket, plain(messages.read(frame, messages.TO_RANK_0)))
            while self.said:
                self._send(socket, self.said.pop(0))
            if not self.silent:
                for sequence in list(self._running.values()):
                    self._step(socket, sequence)
                time.sleep(self.delay)
        socket.close(linger=0)
        context.term()

    def _send(self, socket, message: dict) -> None:
        socket.send_multipart([b"http", msgpack.packb(message)])

    def _receive(self, socket, message: dict) -> None:
        if message["op"] == "submit":
            message["prompt"] = list(memoryview(message["prompt"]).cast("i"))
            self.submitted.append(message)
            if self.refusal is not None:
                status, text = self.refusal
                self._send(
                    socket, {"op": "error", "id": message["id"], "message": text, "field": None, "status": status}
                )
            else:
                self._running[message["id"]] = {**message, "given": 0}
        elif message["op"] == "embed":
            prompt = list(memoryview(message["prompt"]).cast("i"))
            self.submitted.append({**message, "prompt": prompt})
            counts = {"prompt_tokens": len(prompt), "cached_tokens": 0}
            vector = vector_of(prompt).tobytes()
            self._send(socket, {"op": "embedding", "id": message["id"], "vector": vector, **counts})
        elif message["op"] == "abort":
            self.aborted.append(message["id"])
            self._running.pop(message["id"], None)
        elif message["op"] == "watch":
            self.watched += 1
        elif message["op"] == "drain":
            self.drained = True

    def _step(self, socket, sequence: dict) -> None:
        prompt, sampling, given = sequence["prompt"], sequence["sampling"], sequence["given"]
        tokens, stop, finish = [], None, None
        while finish is None and len(tokens) < self.at_once:
            token = prompt[(given + len(tokens)) % len(prompt)]
            if token in sampling["stop_token_ids"]:
                finish, stop = "stop", token
            elif token == 1 and not sampling["ignore_eos"]:
                finish = "stop"
            else:
                tokens += [token][: sampling["max_tokens"]]
                finish = "length" if given + len(tokens) >= sampling["max_tokens"] else None
        top, prompt_top = sampling["logprobs"], sampling["prompt_logprobs"]
        message = {
            "op": "tokens",
            "stop_token": stop,
            "id": sequence["id"],
            "tokens": tokens,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "cached_tokens": 2,
            "cached_from": 8,
            "logprobs": None if top is None else [score(token, top) for token in tokens],
            "prompt_logprobs": None
            if prompt_top is None or given
            else structs.asdict(
                messages.PromptScores.pack([None] + [score(token, prompt_top) for token in prompt[1:]])
            ),
        }
        self._send(socket, message)
        sequence["given"] += len(tokens)
        if finish is not None:
            del self._running[sequence["id"]]


def plain(record) -> dict:
    """All fields of a message, and its `op`."""
    fields = {"op": record.__struct_config__.tag, **structs.asdict(record)}
    for name, value in fields.items():
        if isinstance(value, SamplingParams | Struct):
            fields[name] = asdict(value) if isinstance(value, SamplingParams) else structs.asdict(value)
    return fields


def vector_of(prompt: list[int]) -> np.ndarray:
    """Float32 (8,): how often each token, modulo 8, is there."""
    return np.bincount(np.array(prompt) % 8, minlength=8).astype("<f4")


def score(token: int, top: int) -> list:
    """A logprobs entry: the token with -0.5, and its followers with less."""
    return [-0.5, [[token + rank, -0.5 - rank] for rank in range(top)]]
