"""The format of a chat's answer, and the grammar that it must follow, from its template, tools and prompt."""

import dataclasses
from collections.abc import Callable
from functools import partial

from msgspec import structs

from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.requests.tools import Tools
from ckdist.tokens.chat_template import THOUGHTS, ChatTemplate
from ckdist.tokens.grammar import check_grammar, quoted
from ckdist.tokens.harmony import CHANNEL, END, MARKS, MESSAGE, begun, is_harmony
from ckdist.tokens.harmony_grammar import harmony_grammar
from ckdist.tokens.text_before_calls import ANY, Literal, text_after_thought
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tool_format import PYTHON_TAG, ToolFormat
from ckdist.tokens.tool_grammar import ANSWER, ToolGrammar, with_answer, with_thought

# Text in a template's source -> format of calls that a comparison of the template's prompts cannot detect.
NAMED = {
    "<|tool_calls_section_begin|>": ToolFormat(
        "kimi",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
}


def answer_form(tokenizer: Tokenizer, prompt: str, tools: Tools, split_reasoning: bool) -> AnswerForm | None:
    """Returns the format of an answer to the rendered `prompt`; None if it is text alone.

    `split_reasoning`: separate reasoning from content.
    """
    template = tokenizer.chat_template
    assert template is not None, "with_template gives every served model one"
    name = template.name_for(bool(tools.given))
    source = template.sources[name]
    think = next((marks for marks in THOUGHTS if marks[0] in source or marks[1] in source), None)
    think = think if split_reasoning else None
    if is_harmony(source):
        return _in_channels(tokenizer, prompt, tools, split_reasoning)
    calls = tool_format(template, name) if tools.given else None
    if calls is None and think is None:
        return None
    form = AnswerForm(
        think=think,
        in_thought=think is not None and prompt.rstrip().endswith(think[0]),
        calls=calls,
        types=tools.types if calls is not None else {},
        custom=tuple(sorted(tools.custom)),
        most_calls=None if tools.parallel else 1,
    )
    return structs.replace(form, markers=_markers(tokenizer, form))


def _in_channels(tokenizer: Tokenizer, prompt: str, tools: Tools, split_reasoning: bool) -> AnswerForm:
    """Returns the format of an answer in harmony's channels. Such an answer is always parsed."""
    return AnswerForm(
        think=(f"{CHANNEL}analysis{MESSAGE}", END) if split_reasoning else None,
        calls=ToolFormat("harmony") if tools.given else None,
        types=tools.types,
        custom=tuple(sorted(tools.custom)),
        most_calls=None if tools.parallel else 1,
        markers=tuple(sorted(token for token, text in _special_texts(tokenizer) if text in MARKS)),
        channels=begun(prompt),
    )


def tool_format(template: ChatTemplate, name: str) -> ToolFormat:
    """Returns the format of the model's calls: by a text in its template, else by the template's output."""
    source = template.sources[name]
    named = next((found for text, found in NAMED.items() if text in source), None)
    found = named or template.tool_format(name)
    bare = found.kind == "object" and not found.call_begin.strip() and not found.section_begin.strip()
    return dataclasses.replace(found, kind="llama3") if bare and PYTHON_TAG in source else found


def answer_grammar(
    tokenizer: Tokenizer, form: AnswerForm | None, tools: Tools, structure: str | None, budget: int | None = None
) -> str | None:
    """Returns the grammar of the whole answer; None if the model is free.

    `structure` is the grammar of the answer's text. Reasoning has at most `budget` tokens.
    """
    if form is None:
        return structure
    if form.channels is not None:
        return _grammar_in_channels(tokenizer, form, tools, structure, budget)
    budget = budget if form.think is not None else None
    if form.calls is not None and (tools.must_call or tools.strict or structure is not None or budget is not None):
        return _grammar_of_calls(tokenizer, form, tools, structure, budget)
    if structure is None and budget is not None and form.think is not None:
        return text_after_thought(form.think, form.in_thought, partial(_literal, tokenizer), budget)
    thought_end = _thought_end(form)
    if structure is None or thought_end is None:
        return structure
    return with_answer(with_thought(f"@{ANSWER}", [], thought_end, partial(_literal, tokenizer), budget), structure)


def _grammar_of_calls(
    tokenizer: Tokenizer, form: AnswerForm, tools: Tools, structure: str | None, budget: int | None
) -> str:
    """Returns the grammar of an answer with calls.

    Calls are required, or possible in place of a text by `structure`, or possible anywhere in free text.
    """
    calls = form.calls
    assert calls is not None, "the answer may have calls"

    def grammar(literal: Literal) -> str:
        """Returns the grammar with marks as `literal` writes them."""
        rules = ToolGrammar(calls, literal, tools.strict, budget)
        if structure is None and not tools.must_call:
            return rules.lark_in_text(tools.schemas, tools.parallel, form.think, form.in_thought)
        lark = rules.lark(tools.schemas, tools.parallel, _thought_end(form), or_answer=not tools.must_call)
        return lark if tools.must_call or structure is None else with_answer(lark, structure)

    return _checked(grammar, tokenizer, "tools")


def _grammar_in_channels(
    tokenizer: Tokenizer, form: AnswerForm, tools: Tools, structure: str | None, budget: int | None
) -> str | None:
    """Like `answer_grammar`. If the prompt has begun a message, the answer is its text alone."""
    must_call = form.calls is not None and tools.must_call
    strict = form.calls is not None and tools.strict
    is_free = structure is None and not must_call and not strict and budget is None
    if is_free or MESSAGE in (form.channels or ""):
        return structure
    schemas = tools.schemas if form.calls is not None else {}
    answer = None if must_call else ANY if structure is None else f"@{ANSWER}"

    def grammar(literal: Literal) -> str:
        """Returns the grammar with marks as `literal` writes them."""
        lark = harmony_grammar(literal, schemas, tools.strict, answer, budget)
        return lark if must_call or structure is None else with_answer(lark, structure)

    return _checked(grammar, tokenizer, "tools" if form.calls is not None else "response_format")


def _checked(grammar: Callable[[Literal], str], tokenizer: Tokenizer, field: str) -> str:
    """Returns a grammar with the vocabulary's control tokens.

    It is checked with the texts of these tokens, since the check knows only bytes.
    """
    check_grammar(grammar(quoted), field)
    return grammar(partial(_literal, tokenizer))


def _thought_end(form: AnswerForm) -> str | None:
    """The mark that ends the reasoning which the prompt has begun, or None."""
    return form.think[1] if form.think is not None and form.in_thought else None


def _markers(tokenizer: Tokenizer, form: AnswerForm) -> tuple[int, ...]:
    """The control tokens that occur in the marks of `form`."""
    marks = list(form.think or ())
    if form.calls is not None:
        marks += [*form.calls.markers, *([PYTHON_TAG] if form.calls.kind == "llama3" else [])]
    texts = _special_texts(tokenizer)
    return tuple(sorted(token for token, text in texts if any(text in mark for mark in marks)))


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """Returns `text` as Lark. Control tokens are written by number, so that no other text matches them."""
    found = [(at, -len(name), token) for token, name in _special_texts(tokenizer) if (at := text.find(name)) >= 0]
    if not found:
        return quoted(text)
    at, length, token = min(found)
    before, after = text[:at], text[at - length :]
    parts = [quoted(before)] if before else []
    return " ".join([*parts, f"<[{token}]>", *([_literal(tokenizer, after)] if after else [])])


def _special_texts(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    return [(token, text) for token in tokenizer.special_ids if (text := tokenizer.token_text(token))]
