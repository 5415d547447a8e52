"""The messages between the HTTP process and rank 0: msgpack maps over pyzmq, sized and validated on arrival.

To rank 0 (DEALER -> ROUTER), `op` is one of
    submit   id, prompt (token ids as int32 bytes, little-endian), sampling (the fields of SamplingParams),
             tenant (bytes: only cached blocks of this tenant are reused; absent: one tenant for all; null: no blocks
             are reused or left)
    hello    -                        the first message of a process: earlier requests under its name end
    embed    id, prompt (as above), pooling (of `ckdist.engine.pooling`), first_text (tokens of the first text if the
             prompt has two, else absent), tenant (as above)
    abort    id
    watch    -                        a client watches the machine: for WATCH_SECONDS the status has `ranks`
    drain    -                        finish accepted requests, refuse new ones, then end
From rank 0
    status   state ("loading" | "ready" | "draining" | "failed"), error (str or null), model (map;
             vocab_size and context_length once ready), stats (map of numbers), ranks (one map per rank while a
             client watches, else none), clock (seconds, when stats were read);
             sent on every change and at least once a second: its absence for `STALE_SECONDS` means the engine is stuck
    tokens   id, tokens (new token ids), logprobs (one entry per token, or null),
             finish_reason (null | "stop" | "length" | "abort"), prompt_tokens, cached_tokens,
             cached_from (length of the sequence that left the cached tokens; 0 if there are none),
             prompt_logprobs (once, with the first tokens, or null), stop_token (one of stop_token_ids, or null)
             A logprobs entry is [chosen_logprob, [[token, logprob], ...]]; prompt_logprobs is a map: see `pack_scores`.
    embedding id, vector (float32 bytes, little-endian), prompt_tokens, cached_tokens
    error    id, message, field (str or null), status (an HTTP status: 400, 429, 500, 503)
The stop token itself (EOS or a stop id) is not among `tokens`. The HTTP process finds stop strings and aborts.
"""

from array import array
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 64 << 20
STALE_SECONDS = 5.0
WATCH_SECONDS = 3.0  # after the last `watch`


def encode(message: dict[str, Any]) -> bytes:
    """Encodes one message with msgpack."""
    data = msgpack.packb(message, use_bin_type=True)
    assert data is not None  # a Packer that flushes itself returns bytes
    return data


def decode(data: bytes) -> dict[str, Any]:
    """Decodes one message. Raises ValueError if it is not a map with a string `op`, or is too large."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    message = msgpack.unpackb(data, raw=False, strict_map_key=False)
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ValueError("a message is a map with a string 'op'")
    return message


def pack_scores(entries: list[Any]) -> dict[str, bytes | int]:
    """Packs a prompt's log probabilities as blocks of numbers, since millions are too many to unpack at once.

    Args:
        entries: [chosen_logprob, [[token, logprob], ...]] per token, None for the first. All have equally many
            alternatives.
    """
    scored = entries[1:]
    width = len(scored[0][1]) if scored else 0
    tops = [pair for _, top in scored for pair in top]
    return {
        "width": width,
        "chosen": array("d", [chosen for chosen, _ in scored]).tobytes(),
        "tokens": array("i", [token for token, _ in tops]).tobytes(),
        "logprobs": array("d", [logprob for _, logprob in tops]).tobytes(),
    }


class PromptScores:
    """Reads the result of `pack_scores` one entry at a time.

    Raises ValueError if `packed` cannot come from `pack_scores`.
    """

    def __init__(self, packed: dict[str, Any]) -> None:
        self._width = packed["width"]
        self._chosen, self._logprobs = (memoryview(packed[name]).cast("d") for name in ("chosen", "logprobs"))
        self._tokens = memoryview(packed["tokens"]).cast("i")
        if not len(self._tokens) == len(self._logprobs) == self._width * len(self._chosen):
            raise ValueError(
                f"{len(self._chosen)} scores with {len(self._tokens)} alternatives, not {self._width} each"
            )

    def __len__(self) -> int:
        return len(self._chosen) + 1

    def __getitem__(self, index: int) -> list[Any] | None:
        if index == 0:
            return None
        begin, end = (index - 1) * self._width, index * self._width
        return [
            self._chosen[index - 1],
            [list(pair) for pair in zip(self._tokens[begin:end], self._logprobs[begin:end], strict=True)],
        ]
