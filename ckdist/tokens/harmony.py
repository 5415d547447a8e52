"""OpenAI's harmony format: an answer is messages, each in a channel of the model's. Its marks, what a prompt has of an
answer, and the grammar of an answer.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Source: https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from ckdist.tokens.tool_grammar import ANSWER, Literal, Schemas, json_rule

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ASSISTANT = f"{START}assistant"
FUNCTIONS = "functions."  # before a tool's name


def is_harmony(template: str) -> bool:
    """Whether a chat template writes this format."""
    return f"{CHANNEL}final{MESSAGE}" in template and ASSISTANT in template


def begun(prompt: str) -> str:
    """What a prompt has of the answer, behind the word that says whose it is; empty where a message is to begin."""
    return prompt.rpartition(ASSISTANT)[2]


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
