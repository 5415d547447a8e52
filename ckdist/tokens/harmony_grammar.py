"""The grammar of an answer in OpenAI's harmony format."""

from ckdist.tokens.harmony import ASSISTANT, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE
from ckdist.tokens.text_before_calls import ANY, Literal
from ckdist.tokens.tool_grammar import Schemas, json_rule

MAX_BEFORE = 8  # messages before a free answer or its call


def harmony_grammar(literal: Literal, schemas: Schemas, strict: frozenset[str], answer: str | None) -> str:
    """Lark of an answer that calls one of the tools, whose parameters have these `schemas`. `answer` is a rule of Lark
    for a text that may stand in the final channel instead, None where there must be a call. Analysis may come first,
    and where the answer may be ANY text, what is said before a call too.

    `literal`: a text as Lark. `strict`: the tools whose schemas may hold no keyword that is not known.
    """
    channels = ("analysis", "commentary") if answer == ANY else ("analysis",)
    begins = " | ".join(literal(f"{CHANNEL}{name}{MESSAGE}") for name in channels)
    rules, ways = [f"before: ({begins}) {ANY} {literal(END + ASSISTANT)}"], []
    for index, (name, schema) in enumerate(schemas.items()):
        header = literal(f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")
        rules.append(f"call_{index}: {header} {json_rule(schema, name in strict)}")
        ways.append(f"call_{index}")
    if answer is not None:
        typed = f"({literal(' ' + CONSTRAIN + 'json')})?"
        rules.append(f"final: {literal(f'{CHANNEL}final')} {typed} {literal(MESSAGE)} {answer}")
        ways.append("final")
    most = MAX_BEFORE if answer == ANY else 1
    return "\n".join([f"start: before{{0,{most}}} ({' | '.join(ways)})", *rules])
