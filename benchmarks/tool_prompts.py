"""Asks a running server for calls of tools, and validates every call against its tool's schema.

    python benchmarks/tool_prompts.py URL [--prompts 200] [--first 0] [--at-once 8]

Each prompt is one of TASKS about one of TOPICS; every second is streamed. By turns a call is required, one tool is
named, several calls may come, or the model is free (`auto`) with tools that are strict. Prints what came of each way.
Exit code 1 where an answer does not parse, a call does not validate, or a call that had to come did not.
"""

import argparse
import asyncio
import collections
import json
from typing import Any

import httpx
import jsonschema

SECONDS = 120.0
MAX_TOKENS = 160
TOPICS = (
    "Rome", "the North Sea", "a leap year", "Ada Lovelace", "green tea", "the price of copper", "chess", "São Paulo",
    "a broken bicycle", "the moon", "an invoice of 1,250 €", "snow in May", "bread", "the number π", "a black cat",
    "flight LH 454", "a library card", "volcanoes", 'the word "quote"', "nothing at all",
)  # fmt: skip
TASKS = (
    "What is the weather, and what does it have to do with {}?", "Write a note about {}.", "Put {} on my list.",
    "Book a table for a talk about {}.", "Find three books on {}.", "Convert something to do with {}.",
    "Remind me of {} tomorrow.", "Draw {}.", "Order what I need for {}.", "Rate {}.",
)  # fmt: skip
WORD = {"type": "string", "maxLength": 24}
TIME = {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "day": WORD}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "properties": {"city": WORD, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer"}},
        "required": ["city", "unit"],
    },
    "write_note": {
        "properties": {"title": WORD, "tags": {"type": "array", "items": WORD, "maxItems": 3}, "text": WORD},
        "required": ["title", "tags"],
    },
    "book_table": {
        "properties": {
            "people": {"type": "integer", "minimum": 1, "maximum": 12},
            "when": {"type": "object", "properties": TIME, "required": ["hour"], "additionalProperties": False},
            "outside": {"type": "boolean"},
        },
        "required": ["people", "when", "outside"],
    },
    "convert": {
        "properties": {
            "amount": {"type": "number", "minimum": 0},
            "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "to": {"type": "string", "pattern": "^[A-Z]{3}$"},
        },
        "required": ["amount", "from", "to"],
    },
    "remind": {
        "properties": {"date": {"type": "string", "format": "date"}, "what": {"anyOf": [WORD, {"type": "null"}]}},
        "required": ["date", "what"],
    },
    "draw": {
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 4},
            "color": {"enum": ["red", "green", "blue", None]},
        },
        "required": ["points", "color"],
    },
}
SCHEMAS = {name: {"type": "object", "additionalProperties": False, **schema} for name, schema in SCHEMAS.items()}


def request(number: int) -> tuple[str, dict[str, Any]]:
    """The way of prompt `number`, and its body."""
    names = list(SCHEMAS)
    way = ("required", "named", "parallel", "auto")[number % 4]
    functions = [{"name": name, "parameters": SCHEMAS[name], "strict": way == "auto"} for name in names]
    named = {"type": "function", "function": {"name": names[number // 4 % len(names)]}}
    text = TASKS[number % len(TASKS)].format(TOPICS[number // len(TASKS) % len(TOPICS)])
    return way, {
        "messages": [{"role": "user", "content": text}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": {"named": named, "auto": "auto"}.get(way, "required"),
        "parallel_tool_calls": way == "parallel",
        "max_tokens": MAX_TOKENS,
        "seed": number,
        "stream": number % 2 == 1,
    }


async def asked(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[list[str]], str]:
    """The calls of an answer, as names and arguments, and how it ended."""
    if not body["stream"]:
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
        return [[call["name"], call["arguments"]] for call in calls], choice["finish_reason"]
    calls, reason = list[list[str]](), ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            reason = choice["finish_reason"] or reason
            for delta in choice["delta"].get("tool_calls") or []:
                if delta["index"] == len(calls):
                    calls.append(["", ""])
                calls[delta["index"]][0] += delta["function"].get("name") or ""
                calls[delta["index"]][1] += delta["function"].get("arguments") or ""
    return calls, reason


def problem(way: str, calls: list[list[str]], reason: str) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    if reason == "length" and way in ("auto", "parallel"):
        calls = calls[:-1]  # text, or another call, was cut
    elif reason not in ("tool_calls", "stop"):
        return f"it ended by {reason}"
    if way != "auto" and not calls:
        return "no call came"
    for name, arguments in calls:
        try:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            return f"{name}: {str(error).splitlines()[0]}"
    return None


async def run(url: str, numbers: range, at_once: int) -> int:
    """The prompts of these numbers; how many answers were wrong."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    turn = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        """Prompt `number`."""
        way, body = request(number)
        async with turn:
            calls, reason = await asked(client, body)
        wrong = problem(way, calls, reason)
        counts[way].update(prompts=1, calls=len(calls), cut=reason == "length", wrong=wrong is not None)
        if wrong is not None:
            print(f"prompt {number} ({way}): {wrong}: {calls!r}"[:300])

    fresh = httpx.Limits(max_keepalive_connections=0)  # none that the server has just closed
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=fresh) as client:
        await asyncio.gather(*(one(client, number) for number in numbers))
    for way, count in counts.items():
        print(f"{way}: " + ", ".join(f"{count[name]} {name}" for name in ("prompts", "calls", "cut", "wrong")))
    return sum(count["wrong"] for count in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first prompt")
    parser.add_argument("--at-once", type=int, default=8)
    given = parser.parse_args()
    return 1 if asyncio.run(run(given.url, range(given.first, given.first + given.prompts), given.at_once)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
