"""The rule of requests' fields: what changes the answer and cannot be honoured is refused by name, what is neutral is
accepted, and what nobody knows is ignored. Pure functions of a body; no server.
"""

import json

import pytest

from ckdist.errors import RequestError
from ckdist.serve.requests.chat_request import template_variables
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.grammar import check_grammar
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.served import VOCAB, write_tokenizer

BODIES = {
    "chat": {"messages": [{"role": "user", "content": "ab"}]},
    "completion": {"prompt": "ab"},
    "llama_completion": {"prompt": "ab"},
}
EVERY_KIND = sorted(BODIES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(str(write_tokenizer(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def prepared(tokenizer):
    def run(kind, strict=False, **fields):
        body = json.dumps({**BODIES.get(kind, {}), **fields}).encode()
        return prepare(kind, body, tokenizer, ModelFacts("m", VOCAB, 256, strict))

    return run


@pytest.mark.parametrize(
    "kind, body",
    [
        ("chat", BODIES["chat"]),
        ("messages", {**BODIES["chat"], "max_tokens": 5}),
        ("response", {"input": "ab"}),
        ("infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_a_model_with_an_encoder_completes_alone(tokenizer, kind, body):
    facts = ModelFacts("m", VOCAB, 256, encodes=True)
    with pytest.raises(RequestError, match="has an encoder, and no"):
        prepare(kind, json.dumps(body).encode(), tokenizer, facts)
    assert prepare("completion", b'{"prompt": "ab"}', tokenizer, facts).prompts


# A field, its neutral values, and values that are refused by its name.
RULES = [
    ("grammar", ["", None], ['root ::= "a', "root ::= b", 'root ::= "a"{9999}', '"' * 9]),
    ("json_schema", [None], [{"type": "nonsense"}, "{", "3", {"type": "array", "minItems": -1}]),
    ("guided_json", [None], [{"$ref": "file:///etc/passwd"}, {"type": "string", "format": "nonsense"}]),
    ("guided_regex", ["", None], ["(", "(?=a)b", "a{100000}", "((a{0,1000}){0,1000}){0,1000}"]),
    ("guided_choice", [[], None], [[1], [""], ["a"] * 5000]),
    ("guided_grammar", ["", None], ["start: b"]),
    ("structured_outputs", [None, {}], [{"regex": "("}, {"regex": "a", "choice": ["b"]}]),
    ("format", ["", None], ["xml", {"type": "nonsense"}]),
    (
        "response_format",
        [None, {"type": "text"}],
        [{"type": "nonsense"}, {"type": "json_schema", "json_schema": {}}, {"type": "json_schema"}],
    ),
    ("use_beam_search", [False, None], [True, 1]),
    ("length_penalty", [1.0, 1, None], [1.2, True]),
    ("early_stopping", [False], [True]),
    ("do_sample", [True], [False]),
    ("tfs_z", [1.0, 1], [0.9]),
    ("top_a", [0, 0.0], [0.2]),
    ("n_indent", [0], [4]),
    ("t_max_predict_ms", [0, -1], [500]),
    ("bad_words", [[], None], [["darn"]]),
    ("allowed_token_ids", [None, []], [[5]]),
    ("logits_processors", [None, []], [["x"]]),
    ("truncate_prompt_tokens", [None, -1], [5]),
    ("prompt_logprobs", [None, False], [0, 1, True]),
    ("post_sampling_probs", [False], [True]),
    ("reasoning_format", ["none", "auto"], ["nonsense"]),
    ("include_reasoning", [True], [False]),
    ("options", [None, {}], [{"temperature": 0}]),
    ("images", [[], None], [["..."]]),
    ("lora", [[], None, [{"id": 0, "scale": 1.0}]], [[{"id": 0, "scale": 0.5}]]),
    ("samplers", [None, ["top_k", "temperature"], "kpmt"], [[], ["infill"], ["top_k", 3], "kz"]),
    ("best_of", [1, None], [4]),
    ("suffix", ["", None], ["end"]),
]
KIND_RULES = [
    ("chat", "tools", [[], None], [[{"type": "function"}]]),
    ("chat", "functions", [[], None], [[{"name": ""}]]),
    ("chat", "tool_choice", ["none", "auto", None], ["required", {"type": "function", "function": {"name": "f"}}]),
    ("chat", "function_call", ["none", "auto", None], [{"name": "f"}]),
    ("chat", "modalities", [["text"], None], [["text", "audio"]]),
    ("chat", "echo", [False, None], [True]),
    ("chat", "top_logprobs", [0, None], [3]),
    ("chat", "reasoning", [{}, {"effort": "low"}, {"exclude": False}], [{"exclude": True}]),
    ("chat", "chat_template", ["", None], ["{{ messages }}"]),
    ("completion", "messages", [[], None], [[{"role": "user"}]]),
    ("completion", "echo", [False, True], []),
]
CASES = [
    (kind, *rule) for rule in RULES for kind in EVERY_KIND if not (rule[0] == "suffix" and kind == "chat")
] + KIND_RULES


@pytest.mark.parametrize("kind, name, neutral, refused", CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_neutral_values_are_accepted_and_others_refused_by_name(prepared, kind, name, neutral, refused):
    for value in neutral:
        prepared(kind, strict=True, **{name: value})
    for value in refused:
        with pytest.raises(RequestError, match=name) as error:
            prepared(kind, **{name: value})
        assert error.value.field.partition(".")[0] == name and error.value.code is not None


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_unknown_fields_are_reported_or_refused(prepared, kind):
    assert prepared(kind, temprature=1, zzz=False).ignored == ("temprature", "zzz")
    assert prepared(kind, strict=True, zzz=None).ignored == ()
    assert len(prepared(kind, **{f"{i}" + "x" * 1000: 1 for i in range(500)}).ignored) == 64
    with pytest.raises(RequestError, match="unknown field 'temprature', did you mean 'temperature'") as error:
        prepared(kind, strict=True, temprature=1)
    assert (error.value.field, error.value.code) == ("temprature", "unknown_parameter")


# What a request says, and the field of SamplingParams that it becomes.
SAMPLING = [
    ({"temperature": 100}, {"temperature": 100.0}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 40.0}, {"top_k": 40}),
    ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"repetition_penalty": 1.2, "repeat_penalty": 1.1}, {"repetition_penalty": 1.2}),
    ({"repeat_last_n": -1}, {"repeat_last_n": -1}),
    ({"seed": -1}, {"seed": None}),
    ({"seed": -2}, {"seed": -2}),
    ({"seed": 7.0}, {"seed": 7}),
    ({"typ_p": 0.9}, {"typical_p": 0.9}),
    ({"typical_p": 0.8}, {"typical_p": 0.8}),
    ({"top_n_sigma": 1.5}, {"top_n_sigma": 1.5}),
    (
        {"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2},
        {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
    ),
    ({"mirostat_mode": 1}, {"mirostat": 1}),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
    ({"dynatemp_range": 0.5, "dynatemp_exponent": 2}, {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0}),
    ({"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3}, {"dry_multiplier": 0.8, "dry_allowed_length": 3}),
    (
        {"dry_penalty_last_n": 64, "dry_sequence_breakers": ["\n"]},
        {"dry_penalty_last_n": 64, "dry_sequence_breakers": ("\n",)},
    ),
    ({"samplers": ["top_k", "typical_p", "temp"]}, {"samplers": ("top_k", "typ_p", "temperature")}),
    (
        {"samplers": "edskypmxt"},
        {"samplers": ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")},
    ),
    ({"min_tokens": 3, "min_keep": 2}, {"min_tokens": 3, "min_keep": 2}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"logit_bias": {"5": 1, "7": -100}}, {"logit_bias": {5: 1.0, 7: -100.0}}),
    ({"logit_bias": [[5, 1.5], [7, False]]}, {"logit_bias": {5: 1.5, 7: -100.0}}),
    ({"logit_bias": [["ab", -3]]}, {"logit_bias": {66: -3.0, 67: -3.0}}),
    ({"logit_bias": {"a": False}}, {"logit_bias": {66: -100.0}}),
    ({"logit_bias": [["5", 1]]}, {"logit_bias": {22: 1.0}}),
    ({"logit_bias": []}, {"logit_bias": {}}),
]


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("fields, expected", SAMPLING, ids=[str(fields) for fields, _ in SAMPLING])
def test_sampling_fields_and_their_aliases(prepared, kind, fields, expected):
    sampling = prepared(kind, strict=True, **fields).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


BAD_SAMPLING = [
    {"temperature": -0.1},
    {"temperature": True},
    {"top_p": 1.1},
    {"min_p": "x"},
    {"seed": 1.5},
    {"seed": 1 << 70},
    {"mirostat": 3},
    {"mirostat": True},
    {"typical_p": 2},
    {"xtc_probability": -1},
    {"dry_sequence_breakers": [""]},
    {"dry_sequence_breakers": "x"},
    {"min_tokens": -1},
    {"logit_bias": [[1]]},
    {"logit_bias": [1]},
    {"logit_bias": {"1": True}},
    {"logit_bias": [[260, 1]]},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": [[True, 1]]},
    {"logit_bias": [[1.0, 1]]},
    {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"a" * 300: 1}},
    {"logit_bias": {str(i): 1 for i in range(1025)}},
    {"stop_token_ids": [260]},
    {"max_tokens": -3},
    {"n_predict": 1.5},
    {"stop": [3]},
    {"n": 0},
    {"stream": 1},
    {"stream_options": []},
    {"stream_options": {"include_usage": 1}},
]


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("fields", BAD_SAMPLING, ids=[str(fields)[:40] for fields in BAD_SAMPLING])
def test_values_that_cannot_be_meant(prepared, kind, fields):
    with pytest.raises(RequestError) as error:
        prepared(kind, **fields)
    assert error.value.field in (next(iter(fields)), "stream_options.include_usage")


LENGTHS = [
    ({}, {"chat": None, "completion": 16, "llama_completion": None}),
    ({"max_tokens": -1}, None),
    ({"n_predict": -1}, None),
    ({"num_predict": -2}, None),
    ({"n_predict": 5}, 5),
    ({"num_predict": 6}, 6),
    ({"max_new_tokens": 7}, 7),
    ({"max_tokens": 8.0}, 8),
    ({"max_tokens": 9, "n_predict": 5}, 9),
    ({"max_completion_tokens": 4, "max_tokens": 9}, 4),
    ({"max_tokens": None, "n_predict": 5}, 5),
    ({"max_tokens": -1, "n_predict": 5}, 5),
    ({"max_tokens": 1000}, 1000),
]


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("fields, expected", LENGTHS, ids=[str(fields) for fields, _ in LENGTHS])
def test_lengths(prepared, kind, fields, expected):
    work = prepared(kind, strict=True, **fields)
    limit = expected[kind] if isinstance(expected, dict) else expected
    room = 256 - len(work.prompt_tokens(0))
    assert work.max_tokens == [room if limit is None else min(limit, room)]


def test_min_tokens_fit_the_length(prepared):
    assert prepared("completion", min_tokens=16).sampling.min_tokens == 16
    with pytest.raises(RequestError, match=r"min_tokens \(17\) is more than the 16 tokens"):
        prepared("completion", min_tokens=17)


def test_llama_completion_has_llama_servers_defaults(prepared):
    assert prepared("llama_completion", seed=0xFFFFFFFF).sampling.seed is None
    assert prepared("completion", seed=0xFFFFFFFF).sampling.seed == 0xFFFFFFFF
    sampling = prepared("llama_completion").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert prepared("completion").sampling.top_k == 0


LOGPROBS = [
    ("chat", {"logprobs": True}, 0),
    ("chat", {"logprobs": True, "top_logprobs": 3}, 3),
    ("chat", {"logprobs": False, "top_logprobs": 0}, None),
    ("chat", {"n_probs": 4}, 4),
    ("chat", {"n_probs": 0}, None),
    ("completion", {"logprobs": 0}, 0),
    ("completion", {"logprobs": 5}, 5),
    ("completion", {"logprobs": False}, None),
    ("completion", {"logprobs": True, "top_logprobs": 2}, 2),
    ("completion", {"n_probs": 2}, 2),
    ("llama_completion", {"n_probs": 2}, 2),
    ("llama_completion", {"n_probs": 0}, None),
]


@pytest.mark.parametrize("kind, fields, expected", LOGPROBS)
def test_log_probabilities(prepared, kind, fields, expected):
    work = prepared(kind, strict=True, **fields)
    assert (work.sampling.logprobs, work.logprobs) == (expected, expected is not None)


TEMPLATE_VARIABLES = [
    ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
    ({"think": True}, {"enable_thinking": True, "thinking": True}),
    ({"think": "low"}, {"reasoning_effort": "low"}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, {"enable_thinking": True, "thinking": True}),
    ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}),
    ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    (
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False, "thinking": True},
    ),
    ({"documents": [{"title": "t"}]}, {"documents": [{"title": "t"}]}),
    ({}, {}),
]


@pytest.mark.parametrize("fields, expected", TEMPLATE_VARIABLES, ids=[str(fields) for fields, _ in TEMPLATE_VARIABLES])
def test_variables_of_the_template(fields, expected):
    assert template_variables(Fields(fields)) == expected


def test_mixed_prompts_are_one_prompt(prepared, tokenizer):
    a, b = tokenizer.encode("a", add_special=False), tokenizer.encode("b", add_special=False)
    assert prepared("llama_completion", prompt=[*a, "b", *a]).prompt_tokens(0) == [*a, *b, *a]
    assert prepared("completion", prompt=[["a", *b], "a"], echo=True).texts == ("ab", "a")


def test_bos_is_left_out_on_request(prepared, tokenizer):
    for kind in ("completion", "chat"):
        with_bos, without = (prepared(kind, add_special_tokens=flag).prompt_tokens(0) for flag in (True, False))
        assert with_bos == [*tokenizer.prefix, *without]


@pytest.mark.parametrize(
    "kind, field", [("chat", "messages"), ("completion", "prompt"), ("llama_completion", "prompt")]
)
def test_too_long_a_prompt_is_known_by_code_numbers_and_words(prepared, kind, field):
    text = "a" * 300
    with pytest.raises(RequestError) as error:
        prepared(kind, prompt=text) if field == "prompt" else prepared(
            kind, messages=[{"role": "user", "content": text}]
        )
    assert (error.value.field, error.value.code) == (field, "context_length_exceeded")
    assert error.value.details["n_ctx"] == 256 and error.value.details["n_prompt_tokens"] >= 300
    for words in ("exceeds the available context size", "this model's maximum context length is 256 tokens"):
        assert words in str(error.value)


def test_tokenize_as_vllm_asks(prepared, tokenizer):
    ids = tokenizer.encode("aé", add_special=True)
    answer = prepared("tokenize", prompt="aé", model="m", return_token_strs=True)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
    assert len(answer["token_strs"]) == len(ids)
    chat = prepared("tokenize", messages=BODIES["chat"]["messages"])
    assert tokenizer.decode(chat["tokens"]) == "[user]ab[assistant]" and chat["token_strs"] is None
    bare = prepared("tokenize", messages=BODIES["chat"]["messages"], add_generation_prompt=False)
    assert tokenizer.decode(bare["tokens"]) == "[user]ab"


def test_parse_special_decides_about_control_tokens(prepared):
    assert prepared("tokenize", content="<|end|>")["tokens"] == [1]
    assert len(prepared("tokenize", content="<|end|>", parse_special=False)["tokens"]) == 7


def test_apply_template(prepared):
    assert prepared("apply_template", **BODIES["chat"]) == {"prompt": "[user]ab[assistant]"}


def test_a_field_with_two_names_is_named_as_it_was_sent():
    with pytest.raises(RequestError, match=r"b \(7\) must be from 0 to 1"):
        Fields({"b": 7}).number(("a", "b"), 0.0, 0, 1)


STRUCTURES = [
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}},
        }
    },
    {"response_format": {"type": "json_object", "schema": {"type": "string"}}},
    {"json_schema": {"type": "integer"}},
    {"guided_json": '{"type": "integer"}', "guided_whitespace_pattern": "[ ]?"},
    {"guided_regex": "[0-9]{3}"},
    {"guided_choice": ["yes", 'n"o']},
    {"guided_grammar": 'root ::= "a" b\nb ::= [0-9]*'},
    {"grammar": 'start: "a" /b+/'},
    {"structured_outputs": {"choice": ["a", "b"], "disable_any_whitespace": True}},
    {"structured_outputs": {"json_object": True}},
    {"format": "json"},
]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_form_of_structure_is_one_grammar(prepared, kind):
    assert prepared(kind).sampling.grammar is None
    for fields in STRUCTURES:
        grammar = prepared(kind, strict=True, **fields).sampling.grammar
        check_grammar(grammar)
    assert prepared(kind, guided_choice=["a"]) == prepared(kind, structured_outputs={"choice": ["a"]})
    with pytest.raises(RequestError, match="response_format and guided_regex each define"):
        prepared(kind, response_format={"type": "json_object"}, guided_regex="a")
    unknown = {"type": "string", "format": "nonsense"}
    form = lambda strict: {"type": "json_schema", "json_schema": {"schema": unknown, "strict": strict}}
    assert prepared(kind, response_format=form(False)).sampling.grammar
    with pytest.raises(RequestError, match="nonsense"):
        prepared(kind, response_format=form(True))
