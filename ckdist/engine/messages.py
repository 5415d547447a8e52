"""What the HTTP process and rank 0 say to each other over pyzmq: msgpack maps, sized and validated on arrival.

To rank 0 (DEALER -> ROUTER), `op` is one of
    submit   id, prompt (token ids as int32 bytes, little-endian), sampling (the fields of SamplingParams)
    hello    -                        the first message of a process: what its name has asked for before ends
    abort    id
    drain    -                        finish what runs, take nothing new, then end
From rank 0
    status   state ("loading" | "ready" | "draining" | "failed"), error (str or null), model (map; vocab_size and context_length once ready), stats (map of numbers);
             sent on every change and at least once a second: its absence for `STALE_SECONDS` means the engine is stuck
    tokens   id, tokens (new token ids), logprobs (one entry per token, or null), finish_reason (null | "stop" | "length" | "abort"),
             prompt_tokens, cached_tokens, prompt_logprobs (once, with the first tokens, or null), stop_token (of stop_token_ids, or null)
             A logprobs entry is [chosen_logprob, [[token, logprob], ...]]; prompt_logprobs has null for the first token.
    error    id, message, field (str or null), status (an HTTP status: 400, 429, 500, 503)
The stop token itself (EOS or a stop id) is not among `tokens`. Stop strings are the HTTP process's business: it aborts.
"""

import msgpack

MAX_MESSAGE_BYTES = 64 << 20
STALE_SECONDS = 5.0


def encode(message: dict) -> bytes:
    """One message as msgpack bytes."""
    return msgpack.packb(message, use_bin_type=True)


def decode(data: bytes) -> dict:
    """The message in `data`; ValueError when it is not a map with a string `op`, or is too large."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    message = msgpack.unpackb(data, raw=False, strict_map_key=False)
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ValueError("a message is a map with a string 'op'")
    return message
