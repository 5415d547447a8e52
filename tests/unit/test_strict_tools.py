"""Strict tools in answers that are free: calls validate once they begin, whatever else is asked for."""

import json

import jsonschema
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ckdist.engine.constraint import Constraint
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.tools import Tools
from ckdist.tokens.chat_template import with_template
from ckdist.tokens.grammar import quoted
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tool_format import HERMES
from ckdist.tokens.tool_grammar import ToolGrammar
from tests.support import tool_templates as templates
from tests.support.answers import SCHEMAS, TYPES, read
from tests.support.paged_executable import PagedExecutable

GIVEN = tuple({"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items())
CALL = '{"name": "get", "arguments": {"city": "Rome", "n": 3}}'
BAD = CALL.replace("3", '"x"')
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|im_end|>")


class Reciting(PagedExecutable):
    """Wants to say the tokens of `script` behind a prompt of `prompt` tokens."""

    def __init__(self, script: list[int], prompt: int, **options) -> None:
        super().__init__(**options)
        self.script, self.prompt = script, prompt

    def run(self, batch):
        logits, begin, row = super().run(batch), 0, 0
        for tokens, first, _ in batch.chunks.tolist():
            for output in batch.logits_indices:
                if begin <= output < begin + tokens:
                    place = first + int(output) - begin + 1 - self.prompt
                    if 0 <= place < len(self.script):
                        logits[row, self.script[place]] += 50
                    row += 1
            begin += tokens
        return logits


@pytest.mark.parametrize("said", ["I look.\n", ""])
def test_an_engine_whose_model_writes_wrong_arguments(said):
    tokenizer = tokenizer_of(BUNDLED)
    count = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {**SCHEMAS["get"], "properties": {**SCHEMAS["get"]["properties"], "n": count}}
    grammar = ToolGrammar(HERMES, quoted, frozenset(["get"])).lark_in_text({"get": schema}, False, None, False)
    script = tokenizer.encode(said + '<tool_call>\n{"name": "get", "arguments": {"town": 3', add_special=False)
    executable = Reciting(script, 9, vocab_size=tokenizer.vocab_size, num_blocks=40)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    engine = Engine(executable, Sampler(tokenizer.vocab_size), tokenizer.eos_token_ids, grammars=grammars)
    forms = [{}, {"logprobs": 2}, {"temperature": 0.0}, {"min_tokens": 3}, {"mirostat": 2}, {"top_k": 9}]
    for seed, form in enumerate(forms):  # of one prompt, as n choices are
        engine.add(seed, [5] * 9, SamplingParams(**{"max_tokens": 300, "seed": seed, "grammar": grammar, **form}))
    texts: dict = {seed: [] for seed in range(len(forms))}
    reasons: dict = {}
    for _ in range(3000):
        for output in engine.step() if engine.has_work else []:
            texts[output.id] += output.tokens
            reasons[output.id] = (output.finish_reason, output.error)
    for seed, tokens in texts.items():
        content, _, calls = read(AnswerForm(None, False, HERMES, TYPES), tokenizer.decode(tokens))
        assert content == said.strip() and len(calls) == 1 and reasons[seed] == ("stop", None)
        jsonschema.validate(json.loads(calls[0][1]), schema)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes and marks whose ids are beyond those of bytes."""
    folder = tmp_path_factory.mktemp("marks")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {f"filler{i}": 256 + i for i in range(300)}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(MARKS))
    made.save(str(folder / "tokenizer.json"))
    return folder


def tokenizer_with(folder, template):
    config = {"chat_template": template + "{# <think> #}", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return with_template(load_tokenizer(folder))


def follows(tokenizer, grammar, text, parse_special=True) -> bool:
    """Whether the text, its marks as tokens, is an answer by the grammar."""
    matcher = Grammars(tokenizer, tokenizer.vocab_size).find(grammar).future.result(60).deep_copy()
    tokens = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "template, around", [("TAGGED_JSON", "<tool_call>\n{}\n</tool_call>"), ("LISTED_JSON", "[TOOL_CALLS] [{}]")]
)
def test_marks_that_are_control_tokens(folder, template, around):
    tokenizer = tokenizer_with(folder, getattr(templates, template))
    call, bad = around.replace("{}", CALL), around.replace("{}", BAD)
    form = answer_form(tokenizer, "q", Tools(GIVEN), True)
    assert answer_grammar(tokenizer, form, Tools(GIVEN), None) is None  # nothing is strict
    free = answer_grammar(tokenizer, form, Tools(GIVEN, strict=frozenset(SCHEMAS)), None)
    thought = "<think>Shall I?</think>\n"
    for text in ("", "No.", "I look.\n" + call, call, thought + call, thought + "No."):
        assert follows(tokenizer, free, text), text
    for text in (bad, "I look.\n" + bad, thought + bad, call + " more"):
        assert not follows(tokenizer, free, text), text
    assert not follows(tokenizer, free, call, parse_special=False)  # by letters it would be read as a call
    must = answer_grammar(tokenizer, form, Tools(GIVEN, must_call=True), None)
    assert follows(tokenizer, must, call) and not follows(tokenizer, must, "No.")


def test_reasoning_that_the_prompt_has_begun(folder):
    tokenizer = tokenizer_with(folder, templates.TAGGED_JSON)
    form = answer_form(tokenizer, "q<think>\n", Tools(GIVEN), True)
    free = answer_grammar(tokenizer, form, Tools(GIVEN, strict=frozenset(SCHEMAS)), None)
    call, bad = (f"<tool_call>\n{body}\n</tool_call>" for body in (CALL, BAD))
    assert follows(tokenizer, free, f"Hm.</think>\n\n{call}") and follows(tokenizer, free, "Hm.</think>No.")
    assert not follows(tokenizer, free, f"Hm.</think>\n\n{bad}") and not follows(tokenizer, free, "Hm.")


def test_free_text_forbids_no_letters(folder):
    tokenizer = tokenizer_with(folder, templates.TAGGED_JSON)
    form = answer_form(tokenizer, "q", Tools(GIVEN), True)
    free = answer_grammar(tokenizer, form, Tools(GIVEN, strict=frozenset(SCHEMAS)), None)
    compiled = Grammars(tokenizer, tokenizer.vocab_size).find(free)
    compiled.future.result(60)
    constraint = Constraint(compiled, tokenizer.vocab_size)
    constraint.fill(None)
    allowed = {i for i in range(tokenizer.vocab_size) if constraint.allowed[i // 32] >> i % 32 & 1}
    text = set(tokenizer.encode("any text {}", add_special=False))
    named = {mark: tokenizer.encode(mark, add_special=False, parse_special=True)[0] for mark in MARKS}
    assert text <= allowed and {named["<tool_call>"], named["<think>"], named["<|im_end|>"]} <= allowed
    assert named["[TOOL_CALLS]"] not in allowed and not constraint.forced
