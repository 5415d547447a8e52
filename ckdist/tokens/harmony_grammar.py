"""The grammar of an answer in OpenAI's harmony format."""

from ckdist.tokens.harmony import ASSISTANT, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE
from ckdist.tokens.text_before_calls import ANY, Literal, thought_rules
from ckdist.tokens.tool_grammar import Schemas, json_rule

MAX_BEFORE = 8  # messages before a free answer or its call


def harmony_grammar(
    literal: Literal, schemas: Schemas, strict: frozenset[str], answer: str | None, budget: int | None = None
) -> str:
    """Returns a Lark grammar of an answer that calls one of the tools.

    Analysis may come first. If the answer may be ANY text, commentary before a call may come first too.

    Args:
        literal: Converts a text to Lark.
        schemas: Schemas of the tools' parameters.
        strict: Tools whose schemas may hold no unknown keyword.
        answer: A Lark rule of a text in the final channel, in place of a call. None: there must be a call.
        budget: If set, there is one message of analysis, of at most this many tokens.
    """
    channels = ("analysis", "commentary") if answer == ANY else ("analysis",)
    rules, ways, first = list[str](), list[str](), ""
    if budget is not None:
        first = "analysis? "
        rules += [f"analysis: {literal(f'{CHANNEL}analysis{MESSAGE}')} thought"]
        rules += thought_rules("thought", literal(END + ASSISTANT), budget)
        channels = channels[1:]
    begins = " | ".join(literal(f"{CHANNEL}{name}{MESSAGE}") for name in channels)
    if begins:
        rules.append(f"before: ({begins}) {ANY} {literal(END + ASSISTANT)}")
        first += f"before{{0,{MAX_BEFORE if answer == ANY else 1}}} "
    for index, (name, schema) in enumerate(schemas.items()):
        header = literal(f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")
        rules.append(f"call_{index}: {header} {json_rule(schema, name in strict)}")
        ways.append(f"call_{index}")
    if answer is not None:
        typed = f"({literal(' ' + CONSTRAIN + 'json')})?"
        rules.append(f"final: {literal(f'{CHANNEL}final')} {typed} {literal(MESSAGE)} {answer}")
        ways.append("final")
    return "\n".join([f"start: {first}({' | '.join(ways)})", *rules])
