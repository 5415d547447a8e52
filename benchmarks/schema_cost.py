"""What JSON Schemas cost a running server, in tokens a second of clients that stream at once.

    python benchmarks/schema_cost.py URL [--clients 8] [--rounds 8] [--tokens 96]

Rounds alternate: free answers, texts in a JSON string (every token is sampled under a mask), and objects (the marks
between values are forced, and go in as chunks). Prints the median of each kind's ratio to free answers of the same
round, and the bounds within which it lies with 95 %.
"""

import argparse
import asyncio
import json
import math
import time
from typing import Any

import httpx
from median_bounds import median_within

SECONDS = 120.0
WARM = 2  # rounds before the first that counts

TEXT = {"type": "string", "minLength": 4000}
ENTRY = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2999},
        "kind": {"enum": ["book", "film", "song"]},
        "good": {"type": "boolean"},
    },
    "required": ["title", "year", "kind", "good"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ENTRY, "minItems": 200}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "string": {"response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": TEXT}}},
    "objects": {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}},
}


async def answer(client: httpx.AsyncClient, number: int, tokens: int, fields: dict[str, Any]) -> int:
    """Streams one answer; the tokens that it had."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me of book number {number}, and then of others."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    usage = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {") and '"usage"' in line:
                given = json.loads(line[6:]).get("usage")
                usage = given["completion_tokens"] if given else usage
    if usage != tokens:
        raise SystemExit(f"an answer has {usage} tokens, not {tokens}: the model has ended it")
    return usage


async def speed(client: httpx.AsyncClient, clients: int, tokens: int, fields: dict[str, Any]) -> float:
    """Tokens a second of all clients together."""
    begin = time.perf_counter()
    counts = await asyncio.gather(*(answer(client, number, tokens, fields) for number in range(clients)))
    return sum(counts) / (time.perf_counter() - begin)


async def measure(url: str, clients: int, rounds: int, tokens: int) -> dict[str, list[float]]:
    """The speeds of each kind, round by round."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        for number in range(-WARM, rounds):
            names = list(KINDS) if number % 2 else list(reversed(KINDS))
            for name in names:
                reached = await speed(client, clients, tokens, KINDS[name])
                if number >= 0:
                    found[name].append(reached)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    found = asyncio.run(measure(given.url, given.clients, given.rounds, given.tokens))
    for name, speeds in found.items():
        middle = sorted(speeds)[len(speeds) // 2]
        logs = [math.log(one / free) for one, free in zip(speeds, found["free"], strict=True)]
        if name == "free":
            print(f"free: {middle:.1f} tokens/s, {given.clients} clients, {given.rounds} rounds")
            continue
        low, ratio, high = map(math.exp, median_within(logs))
        print(f"{name}: {middle:.1f} tokens/s, {ratio:.3f} of free ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
