"""The grammar of an answer in OpenAI's harmony format."""

from ckdist.tokens.harmony import ASSISTANT, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE
from ckdist.tokens.tool_grammar import ANSWER, Literal, Schemas, json_rule


def harmony_grammar(literal: Literal, schemas: Schemas, strict: frozenset[str], answers: bool) -> str:
    """Lark of an answer that calls one of the tools, whose parameters have these `schemas`; where it `answers`, it
    may follow the grammar ANSWER in the final channel instead. Analysis may come first.

    `literal`: a text as Lark. `strict`: the tools whose schemas may hold no keyword that is not known.
    """
    thought = f"{literal(f'{CHANNEL}analysis{MESSAGE}')} /(?s:.*)/ {literal(END + ASSISTANT)}"
    rules, ways = [f"thought: {thought}"], []
    for index, (name, schema) in enumerate(schemas.items()):
        header = literal(f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")
        rules.append(f"call_{index}: {header} {json_rule(schema, name in strict)}")
        ways.append(f"call_{index}")
    if answers:
        typed = f"({literal(' ' + CONSTRAIN + 'json')})?"
        rules.append(f"final: {literal(f'{CHANNEL}final')} {typed} {literal(MESSAGE)} @{ANSWER}")
        ways.append("final")
    return "\n".join([f"start: thought? ({' | '.join(ways)})", *rules])
