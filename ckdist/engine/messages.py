"""What the HTTP process and rank 0 say to each other over pyzmq: msgpack maps, sized and validated on arrival.

To rank 0 (DEALER -> ROUTER), `op` is one of
    submit   id, prompt (token ids as int32 bytes, little-endian), sampling (the fields of SamplingParams),
             tenant (bytes: it takes over cached blocks of that tenant alone; absent: one tenant for all; null: it
             neither takes over blocks nor leaves any)
    hello    -                        the first message of a process: what its name has asked for before ends
    embed    id, prompt (as above), pooling (of `ckdist.engine.pooling`), first_text (of a prompt of two texts the
             tokens of the first, else absent), tenant (as above)
    abort    id
    watch    -                        somebody looks at the machine: for WATCH_SECONDS the status has `ranks`
    drain    -                        finish what runs, take nothing new, then end
From rank 0
    status   state ("loading" | "ready" | "draining" | "failed"), error (str or null), model (map;
             vocab_size and context_length once ready), stats (map of numbers), ranks (a map for each, while
             somebody looks, else none), clock (seconds, when stats were read);
             sent on every change and at least once a second: its absence for `STALE_SECONDS` means the engine is stuck
    tokens   id, tokens (new token ids), logprobs (one entry per token, or null),
             finish_reason (null | "stop" | "length" | "abort"), prompt_tokens, cached_tokens,
             cached_from (length of the sequence that left the cached tokens; 0 if there are none),
             prompt_logprobs (once, with the first tokens, or null), stop_token (of stop_token_ids, or null)
             A logprobs entry is [chosen_logprob, [[token, logprob], ...]]; prompt_logprobs is a map: see `pack_scores`.
    embedding id, vector (float32 bytes, little-endian), prompt_tokens, cached_tokens
    error    id, message, field (str or null), status (an HTTP status: 400, 429, 500, 503)
The stop token itself (EOS or a stop id) is not among `tokens`. Stop strings are the HTTP process's business: it aborts.
"""

from array import array
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 64 << 20
STALE_SECONDS = 5.0
WATCH_SECONDS = 3.0  # after the last message that somebody looks


def encode(message: dict[str, Any]) -> bytes:
    """One message as msgpack bytes."""
    data = msgpack.packb(message, use_bin_type=True)
    assert data is not None  # as with every Packer that flushes itself
    return data


def decode(data: bytes) -> dict[str, Any]:
    """The message in `data`; ValueError when it is not a map with a string `op`, or is too large."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    message = msgpack.unpackb(data, raw=False, strict_map_key=False)
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ValueError("a message is a map with a string 'op'")
    return message


def pack_scores(entries: list[Any]) -> dict[str, bytes | int]:
    """The log probabilities of a prompt as blocks of numbers: of a long one they are millions, too many to unpack at
    once.

    `entries`: [chosen_logprob, [[token, logprob], ...]] for each token but the first, whose entry is None; all have as
    many alternatives.
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
    """What `pack_scores` packed, an entry at a time. ValueError for what it cannot have made."""

    def __init__(self, packed: dict[str, Any]) -> None:
        """`packed`: what `pack_scores` gave, or what a peer says it gave."""
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
