"""A budget of thinking: after so many tokens the mark that ends it is forced, in whatever form the model thinks."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.requests.tools import Tools
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.chat_template import with_template
from ckdist.tokens.grammar import json_schema_grammar, quoted
from ckdist.tokens.text_before_calls import text_after_thought
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.unit.test_harmony import TEMPLATE as CHANNELS
from tests.unit.test_harmony import TOOLS as GIVEN
from tests.unit.test_strict_tools import Reciting

BUDGET = 6
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "n": 3}}\n</tool_call>'
PLAIN = "{{ messages[-1].content }}{# <think> #}"
OPENED = PLAIN + "{{ '<think>' }}"
CONTROL = ("<think>", "</think>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>")


def of_bytes(folder, template, special):
    """A tokenizer of bytes, whose marks are control tokens where they are `special`, and else letters."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(CONTROL) if special else ["<|return|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|return|>"}))
    return with_template(load_tokenizer(folder))


def follows(tokenizer, grammar, text):
    """Whether the whole text, its marks as tokens where they are such, is an answer by the grammar."""
    matcher = Grammars(tokenizer, tokenizer.vocab_size).find(grammar).future.result(60).deep_copy()
    for token in tokenizer.encode(text, add_special=False, parse_special=True):
        if not matcher.compute_bitmask()[token // 8] >> token % 8 & 1 or not matcher.consume_token(token):
            return False
    return matcher.is_accepting()


def budgeted(tokenizer, prompt, tools=None, structure=None, budget=BUDGET):
    """With marks of letters these count as well."""
    tools = tools or Tools()
    budget += 0 if 256 + 1 in tokenizer.special_ids or not budget else len("</think>")
    return answer_grammar(tokenizer, answer_form(tokenizer, prompt, tools, True), tools, structure, budget)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_thinking_ends_at_its_budget_or_before(tmp_path, special, opened):
    tokenizer = of_bytes(tmp_path, OPENED if opened else PLAIN, special)
    begin, prompt = ("", "q<think>") if opened else ("<think>", "q")
    free = budgeted(tokenizer, prompt)
    for text in ("abc</think>\nYes, < no.", "abcdef</think>Yes.", "a</thi" * special + "</think>"):
        assert follows(tokenizer, free, begin + text), text
    assert not follows(tokenizer, free, begin + "abcdefg</think>Yes.")
    assert follows(tokenizer, free, "Yes, at once: longer than that.") is not opened
    none = budgeted(tokenizer, prompt, budget=0)
    assert follows(tokenizer, none, begin + "</think>Yes.") and not follows(tokenizer, none, begin + "a</think>Yes.")
    must = budgeted(tokenizer, prompt, Tools(GIVEN.given, must_call=opened))
    assert follows(tokenizer, must, f"{begin}ab</think>\n{CALL}") and not follows(
        tokenizer, must, f"{begin}abcdefg</think>{CALL}"
    )
    if opened:
        number = budgeted(tokenizer, prompt, structure=json_schema_grammar({"type": "integer"}))
        assert follows(tokenizer, number, "ab</think>7") and not follows(tokenizer, number, "abcdefg</think>7")


def test_thinking_in_a_channel_ends_at_its_budget(tmp_path):
    tokenizer = of_bytes(tmp_path, CHANNELS, True)
    said = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for tools in (Tools(), GIVEN):
        free = budgeted(tokenizer, "q<|start|>assistant", tools)
        assert follows(tokenizer, free, said.format("abcdef")) and follows(tokenizer, free, said[said.rindex("<|ch") :])
        assert not follows(tokenizer, free, said.format("abcdefg"))


def test_an_engine_whose_model_thinks_for_ever():
    tokenizer = tokenizer_of(BUNDLED)
    grammar = text_after_thought(("<think>", "</think>"), True, quoted, 9)
    script = tokenizer.encode("I think and think, " * 30, add_special=False)
    executable = Reciting(script, 4, vocab_size=tokenizer.vocab_size, num_blocks=40)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    engine = Engine(executable, Sampler(tokenizer.vocab_size), tokenizer.eos_token_ids, grammars=grammars)
    for number, form in enumerate(({}, {"logprobs": 2}, {"temperature": 0.0})):
        engine.add(number, [5] * 4, SamplingParams(max_tokens=60, seed=3, grammar=grammar, **form))
    tokens: dict = {number: [] for number in range(3)}
    for _ in range(500):
        for output in engine.step() if engine.has_work else []:
            tokens[output.id] += output.tokens
            assert output.error is None
    for made in tokens.values():
        assert len(made) == 60 and made[:9] == script[:9]
        assert tokenizer.decode(made[9:]).startswith("</think>")


NAMES = [
    {"thinking": {"type": "enabled", "budget_tokens": 7}},
    {"reasoning": {"max_tokens": 7}},
    *({name: 7} for name in ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget")),
]


@pytest.mark.parametrize("fields", NAMES, ids=[next(iter(fields)) for fields in NAMES])
def test_every_name_of_a_budget_is_honoured(tmp_path, fields):
    tokenizer = of_bytes(tmp_path, OPENED, True)
    ask = lambda **more: prepare(
        "chat", json.dumps({"messages": [{"role": "user", "content": "q"}], **more}).encode(), tokenizer, FACTS
    )
    assert "max_tokens=7" in ask(**fields).sampling.grammar
    assert ask(**fields, max_tokens=7).sampling.grammar is None  # the answer's own length comes first
    assert ask(thinking_budget=-1).sampling.grammar is None
    with pytest.raises(RequestError, match="reasoning_format"):
        ask(**fields, reasoning_format="none")


FACTS = ModelFacts("m", 264, 256)
