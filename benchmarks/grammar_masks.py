"""How long the masks of grammars take: the part of a token's cost that a grammar adds beside the forward pass.

    python benchmarks/grammar_masks.py -m MODEL [--rounds 20]

Follows answers of several forms token by token, each with the longest tokens that its grammar allows, with the
vocabulary of a model, whose weights are not read. Printed are the times of a token's mask and of the step to the next
one, the tokens that were forced and so needed neither, and the time that compiling took. One thread, and nothing else
on the machine, or the figures say nothing.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

from ckdist.engine.constraint import Constraint
from ckdist.engine.grammars import Grammars
from ckdist.hub.resolve import resolve
from ckdist.tokens.grammar import json_schema_grammar, quoted, regex_grammar, text_grammar
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tool_format import HERMES
from ckdist.tokens.tool_grammar import ToolGrammar

TEXT = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["sailor", "cook", "captain"]},
        "ships": {"type": "array", "items": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}},
        "note": {"type": "string", "maxLength": 400},
    },
    "required": ["name", "age", "role", "ships", "note"],
    "additionalProperties": False,
}
STORY = (
    "She went to sea when she was young, and came home with stories that nobody believed. When asked about the storm "
    "of that winter she only smiled, and said that the ship had known the way."
)
ANSWER = json.dumps(
    {"name": "Ada Tern", "age": 41, "role": "cook", "ships": [{"name": "Gull"}, {"name": "North Star"}], "note": STORY}
)
TOOLS = {f"tool_{i}": PERSON for i in range(8)}
CALL = f'<tool_call>\n{{"name": "tool_3", "arguments": {ANSWER}}}\n</tool_call>'
GBNF = 'root ::= line+\nline ::= "- " word (" " word)* "\\n"\nword ::= [a-zA-Z.,]+'


@dataclass
class Times:
    """Of one form, in seconds."""

    masks: list[float] = field(default_factory=list)
    advances: list[float] = field(default_factory=list)
    forced: int = 0
    compiled: float = 0.0


def forms() -> dict[str, tuple[str, str]]:
    """A grammar and a text that follows it, by name."""
    free = ToolGrammar(HERMES, quoted, frozenset(TOOLS)).lark_in_text(TOOLS, True, ("<think>", "</think>"), False)
    call = ToolGrammar(HERMES, quoted, frozenset(TOOLS)).lark(TOOLS, True, None)
    return {
        "JSON Schema": (json_schema_grammar(PERSON), ANSWER),
        "any JSON object": (json_schema_grammar({"type": "object"}), ANSWER),
        "call that must come": (call, CALL),
        "free text, strict tools": (free, STORY),
        "free text and a call": (free, f"<think>{STORY}</think>\n{STORY}\n{CALL}"),
        "regular expression": (
            regex_grammar(r"([A-Z][a-z]+, )*([a-z]+ )*\d{4}-\d{2}-\d{2}"),
            "Ada, Tern, on 1911-02-03",
        ),
        "GBNF": (text_grammar(GBNF), "- she went to sea.\n- the ship had known the way\n"),
    }


def follow(tokenizer: Tokenizer, grammars: Grammars, grammar: str, text: str, times: Times) -> None:
    """Walks along `text` once."""
    begin = time.perf_counter()
    compiled = grammars.find(grammar)
    compiled.future.result()
    times.compiled = max(times.compiled, time.perf_counter() - begin)
    constraint, left = Constraint(compiled, grammars.vocab_size), text.encode()
    while left:
        begin = time.perf_counter()
        constraint.fill(None)
        middle = time.perf_counter()
        if constraint.error is not None:
            raise SystemExit(constraint.error)
        forced = constraint.take_forced()
        if forced:
            times.forced += len(forced)
            left = left[len(b"".join(tokenizer.pieces[token] for token in forced)) :]
            continue
        times.masks.append(middle - begin)
        token = longest(tokenizer, constraint, left)
        begin = time.perf_counter()
        constraint.advance(token)
        times.advances.append(time.perf_counter() - begin)
        left = left[len(tokenizer.pieces[token]) :]


def longest(tokenizer: Tokenizer, constraint: Constraint, text: bytes) -> int:
    """The longest token that the grammar allows and that `text` begins with."""
    words = constraint.allowed
    for size in range(min(len(text), 24), 0, -1):
        for token in tokenizer.encode(text[:size].decode("utf-8", "ignore"), add_special=False)[:1]:
            if tokenizer.pieces[token] == text[:size] and words[token // 32] >> token % 32 & 1:
                return token
    raise SystemExit(f"the grammar does not allow {text[:40]!r}")


def row(name: str, times: Times) -> str:
    """A line of the table."""
    cuts = statistics.quantiles(times.masks, n=100)
    p50, p90, p99 = (1e6 * cuts[i - 1] for i in (50, 90, 99))
    step = 1e6 * statistics.median(times.advances)
    return (
        f"| {name} | {len(times.masks)} | {times.forced} | {p50:.0f} | {p90:.0f} | {p99:.0f} | {step:.0f} "
        f"| {1e3 * times.compiled:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    tokenizer = tokenizer_of(resolve(given.model))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    begin = time.perf_counter()
    grammars.prepare()
    print(f"{grammars.vocab_size} tokens, read in {time.perf_counter() - begin:.1f} s")
    print("| form | masks | forced tokens | p50, µs | p90 | p99 | next token, µs | compiled, ms |")
    print("|---|---|---|---|---|---|---|---|")
    every = Times()
    for name, (grammar, text) in forms().items():
        times = Times()
        for _ in range(given.rounds):
            follow(tokenizer, grammars, grammar, text, times)
        print(row(name, times), flush=True)
        every.masks += times.masks
        every.advances += times.advances
        every.forced += times.forced
        every.compiled = max(every.compiled, times.compiled)
    print(row("all", every))


if __name__ == "__main__":
    main()
