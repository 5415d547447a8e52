"""The table of fields: each row holds on each of its faces, and what is read has a row. No server."""

import json

import pytest
from msgspec import structs

from ckdist.errors import RequestError
from ckdist.serve.requests.field_table import RULES, Harmless, Honoured, Neutral
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.served import TEMPLATE, VOCAB, write_tokenizer

CHAT = {"messages": [{"role": "user", "content": "ab"}]}
FACES = {
    "chat": CHAT,
    "completion": {"prompt": "ab"},
    "llama_completion": {"prompt": "ab"},
    "infill": {"input_prefix": "a", "input_suffix": "b"},
    "response": {"input": "ab"},
    "messages": {**CHAT, "max_tokens": 5},
    "count_tokens": CHAT,
    "apply_template": CHAT,
    "embedding": {"input": "ab"},
    "llama_embedding": {"content": "ab"},
    "rerank": {"query": "a", "documents": ["b"]},
    "score": {"text_1": "a", "text_2": "b"},
    "tokenize": {"content": "ab"},
    "detokenize": {"tokens": [66]},
}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "integer"}}
# Of each honoured field a value that changes what the engine gets or the answer holds, with what else it needs.
CHANGES = {
    "activation": {"activation": False, "scores": "sigmoid"},
    "add_generation_prompt": {"add_generation_prompt": False},
    "add_special": {"add_special": True},
    "best_of": {"best_of": 5},
    "chat_template_kwargs": {"chat_template_kwargs": {"shout": True}},
    "content": {"content": "cd"},
    "continue_final_message": {"continue_final_message": True},
    "dimensions": {"dimensions": 2},
    "documents": {"documents": ["c"]},
    "embd_normalize": {"embd_normalize": -1},
    "encoding_format": {"encoding_format": "base64"},
    "format": {"format": "json"},
    "function_call": {"function_call": "required", "functions": [TOOL["function"]]},
    "functions": {"functions": [TOOL["function"]]},
    "grammar": {"grammar": 'root ::= "a"'},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a"'},
    "guided_json": {"guided_json": {"type": "integer"}},
    "guided_regex": {"guided_regex": "a"},
    "spec": {"spec": "ngram"},
    "speculative.n_max": {"speculative.n_max": 3},
    "speculative.n_min": {"speculative.n_min": 3},
    "speculative.p_min": {"speculative.p_min": 0.5},
    "speculative.type": {"speculative.type": "ngram-simple"},
    "include": {"include": ["message.output_text.logprobs"]},
    "input": {"input": "cd", "content": None},
    "input_extra": {"input_extra": 3},
    "input_prefix": {"input_prefix": 3},
    "input_suffix": {"input_suffix": 3},
    "instructions": {"instructions": "c"},
    "json_schema": {"json_schema": {"type": "integer"}},
    "logit_bias": {"logit_bias": {"5": 1}},
    "logprobs": {"logprobs": True},
    "lora": {"lora": [{"id": 0, "scale": 1}]},
    "messages": {"messages": [{"role": "user", "content": "cd"}]},
    "metadata": {"metadata": {"a": "b"}},
    "model": {"model": "a"},
    "min_tokens": {"min_tokens": 3},
    "output_config.effort": {"output_config": {"effort": 3}},
    "output_config.format": {"output_config": {"format": SCHEMA}},
    "output_format": {"output_format": SCHEMA},
    "parse_special": {"parse_special": False, "content": "<|end|>"},
    "prompt": {"prompt": "cd", "content": None},
    "query": {"query": 3},
    "reasoning.effort": {"reasoning": {"effort": 3}},
    "reasoning.enabled": {"reasoning": {"enabled": 3}},
    "reasoning.max_tokens": {"reasoning": {"max_tokens": -3}},
    "response_format": {"response_format": {"type": "json_object"}},
    "response_fields": {"response_fields": ["content"]},
    "return_documents": {"return_documents": True},
    "return_text": {"return_text": True},
    "samplers": {"samplers": ["top_k"]},
    "seed": {"seed": 7},
    "stop": {"stop": "x"},
    "stop_sequences": {"stop_sequences": ["x"]},
    "stop_token_ids": {"stop_token_ids": [5]},
    "stream": {"stream": True},
    "stream_options.continuous_usage_stats": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "stream_options.include_usage": {"stream": True, "stream_options": {"include_usage": True}},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["a"]}},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": 'root ::= "a"'}},
    "structured_outputs.json": {"structured_outputs": {"json": {"type": "integer"}}},
    "structured_outputs.json_object": {"structured_outputs": {"json_object": True}},
    "structured_outputs.regex": {"structured_outputs": {"regex": "a"}},
    "structured_outputs.whitespace_pattern": {"structured_outputs": {"whitespace_pattern": 3}},
    "system": {"system": "c"},
    "text.format": {"text": {"format": SCHEMA}},
    "text.verbosity": {"text": {"verbosity": 3}},
    "text_1": {"text_1": "c"},
    "text_2": {"text_2": "c"},
    "texts": {"texts": ["c"]},
    "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": -3}},
    "thinking.type": {"thinking": {"type": "sometimes"}},
    "enable_thinking": {"enable_thinking": "x"},
    "think": {"think": {"type": "x"}},
    "thinking": {"thinking": "x"},
    "tokens": {"tokens": [67]},
    "tool_choice": {"tool_choice": "required"},
    "tools": {"tools": [TOOL]},
    "top_n": {"top_n": 3},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": -3},
    "use_activation": {"use_activation": False, "scores": "sigmoid"},
    "verbosity": {"verbosity": 3},
    "with_pieces": {"with_pieces": True},
}
SHOWN = (
    "chat",
    "completion",
    "llama_completion",
    "response",
    "messages",
    "embedding",
    "llama_embedding",
    "rerank",
    "score",
)
WRONG = {"another": ["value"]}  # of a type that no other field takes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    template = TEMPLATE + "{% if documents %}{{ documents }}{% endif %}"
    return tokenizer_of(str(write_tokenizer(tmp_path_factory.mktemp("model"), template)))


@pytest.fixture
def prepared(tokenizer):
    def run(face, strict=False, scores="", **fields):
        facts = ModelFacts("m", VOCAB, 256, strict, scores, adapters={"a": 0})
        return prepare(face, json.dumps(fields).encode(), tokenizer, facts)

    return run


def outcome(prepared, face, **fields):
    """What comes of a request, without what the answer repeats of it, or the field that its refusal names.

    Items that are kept have random ids.
    """
    try:
        result = prepared(face, **{**FACES[face], **fields})
        if face != "response":
            return result
        return structs.replace(result, echoed={"metadata": result.echoed["metadata"]}, items=result.items[:0])
    except RequestError as error:
        return f"refused: {error.field} {error}"


@pytest.mark.parametrize("face", sorted(RULES))
def test_every_row_of_the_table_holds(prepared, face):
    plain = outcome(prepared, face)
    for name, rule in RULES[face].items():
        top, _, inner = (name, "", "") if name.startswith("speculative.") else name.partition(".")
        given = lambda value, top=top, inner=inner: {top: {inner: value} if inner else value}
        if isinstance(rule, Harmless):
            assert len(rule.reason.split()) > 3, name
            assert outcome(prepared, face, **given(True)) == plain, name
        elif isinstance(rule, Neutral):
            for value in rule.values:
                assert outcome(prepared, face, **given(value)) == plain, (name, value)
            with pytest.raises(RequestError, match=f"{name} is not supported by this server") as error:
                prepared(face, **{**FACES[face], **given(WRONG)})
            assert error.value.field == name and error.value.code == "unsupported_parameter"
        else:
            given = CHANGES.get(name, given(WRONG))
            scored = {name: value for name, value in given.items() if name == "scores"}
            changed, before = outcome(prepared, face, **given), outcome(prepared, face, **scored) if scored else plain
            if face in SHOWN:
                assert changed != before, f"{name} is honoured on {face} by its row, and changes nothing"
                assert name in CHANGES or changed.startswith(f"refused: {name}"), name


def test_a_field_that_a_module_reads_has_a_row(prepared, monkeypatch):
    """The other direction: nothing is read that the table does not know, and rows name the module that reads."""
    read, find = set(), Fields._find
    monkeypatch.setattr(
        Fields, "_find", lambda self, names, *more: (read.update(self._shown(n) for n in ([names] if isinstance(
            names, str) else names)), find(self, names, *more))[1]
    )  # fmt: skip
    for face, body in FACES.items():
        read.clear()
        outcome(prepared, face, **body)
        inner = {name.partition(".")[0] for name in RULES[face]}
        known = {name for name in read if name in inner or name.partition(".")[0] in ("tool_choice", "response_format")}
        assert read - known - set(RULES[face]) == set(), face


def test_no_secret_nor_order_is_without_effect():
    for face, rules in RULES.items():
        for name in ("cache_salt", "cache_prompt", "priority"):
            assert not isinstance(rules.get(name), Harmless), (face, name)
    for name in ("output_config.format", "output_format", "mcp_servers", "context_management"):
        assert isinstance(RULES["messages"][name], Honoured | Neutral)


def test_what_claude_code_sends_with_every_request_is_neutral(prepared):
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = {**FACES["messages"], "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    assert prepared("messages", strict=True, **body, context_management=edits).prompts
    edits["edits"][0]["keep"] = {"type": "thinking_turns", "value": 1}
    with pytest.raises(RequestError, match="context_management"):
        prepared("messages", **body, context_management=edits)
