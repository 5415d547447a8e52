"""The server's defaults of requests: a request's own field wins, under each of its names. Pure functions of a body."""

import json

import pytest

from ckdist.config.request_defaults import RequestDefaults
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.typed_records import converted
from ckdist.errors import ConfigError
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.settings import HttpSettings
from ckdist.serve.template_file import read_template_file
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer_source import CHAT_TEMPLATE, tokenizer_of
from tests.support.reasoning_templates import QWEN3
from tests.support.served import VOCAB, write_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.content }}{{ style or '' }}>{% endfor %}"
MESSAGES = [{"role": "user", "content": "ab"}]


def tokenizer(folder, template=TEMPLATE):
    return tokenizer_of(str(write_tokenizer(folder)), {CHAT_TEMPLATE: template})


def facts(**defaults):
    return ModelFacts("m", VOCAB, 256, defaults=RequestDefaults(**defaults))


def sampling(kind, given, tmp_path, **body):
    body = {"chat": {"messages": MESSAGES}}.get(kind, {"prompt": "ab"}) | body
    return prepare(kind, json.dumps(body).encode(), tokenizer(tmp_path), given).sampling


@pytest.mark.parametrize("kind", ["chat", "completion", "llama_completion"])
def test_fields_of_a_request_win_over_the_servers_defaults(kind, tmp_path):
    given = facts(sampling={"temperature": 0.25, "repetition_penalty": 1.5, "samplers": ("top_k",)}, max_tokens=7)
    found = sampling(kind, given, tmp_path)
    assert (found.temperature, found.repetition_penalty, found.samplers, found.max_tokens) == (0.25, 1.5, ("top_k",), 7)
    found = sampling(kind, given, tmp_path, temperature=2, repeat_penalty=1, n_predict=9)
    assert (found.temperature, found.repetition_penalty, found.max_tokens) == (2, 1, 9)


def test_a_template_and_its_variables_come_from_flags(tmp_path):
    given, chats = facts(template_variables={"style": "!"}), tokenizer(tmp_path)
    render = lambda **body: prepare("apply_template", json.dumps({"messages": MESSAGES} | body).encode(), chats, given)
    assert render() == {"prompt": "<ab!>"}
    assert render(chat_template_kwargs={"style": "?"}) == {"prompt": "<ab?>"}


def test_a_budget_of_thinking_is_the_servers_unless_the_request_says(tmp_path):
    def forces(**body):
        work = prepare("chat", json.dumps({"messages": MESSAGES} | body).encode(), tokenizer(tmp_path, QWEN3), given)
        return work.sampling.grammar is not None

    given = facts(thinking_budget=3)
    assert forces() and forces(thinking_budget=5)
    assert not forces(thinking_budget=-1) and not forces(reasoning_format="none")


def test_the_flags_reach_the_http_process_as_they_are():
    config = ServeConfig(temperature=0.5, samplers=("top_k",), reasoning_budget=0, chat_template_kwargs='{"a": 1}')
    settings = HttpSettings(
        endpoint="e", model="m", model_name="n", listener=3, parent=1, defaults=config.request_defaults
    )
    read = HttpSettings.from_json(settings.to_json()).defaults
    assert read.sampling == {"temperature": 0.5, "samplers": ("top_k",)}
    assert (read.thinking_budget, read.template_variables, read.max_tokens) == (0, {"a": 1}, None)
    assert converted(RequestDefaults, {}) == ServeConfig().request_defaults


def test_a_wrong_template_is_one_line(tmp_path):
    (tmp_path / "t.jinja").write_text("a\n{% if %}")
    with pytest.raises(ConfigError, match=r"t.jinja is no template: line 2: "):
        read_template_file(str(tmp_path / "t.jinja"))
    with pytest.raises(ConfigError, match="--chat-template-kwargs is not a JSON object"):
        ServeConfig(chat_template_kwargs="[1]")
