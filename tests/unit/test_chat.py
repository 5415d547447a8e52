"""Chat templates: what the sandbox offers and forbids, and OpenAI's chats in the forms that templates of different
traits take.
"""

import json

import pytest

from ckdist.errors import ModelFileError, RequestError
from ckdist.tokens.chat_template import CHATML, ChatTemplate

CALLS = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}]
HISTORY = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call00001", "content": "21"},
    {"role": "user", "content": "r"},
]
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + PROMPT
# Neither system nor tool messages, and roles that alternate.
STRICT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Content as a list of parts alone.
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ '(' + p.text + ')' }}{% endfor %}{% endfor %}"
OBJECTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ v }}{% endfor %}{% endfor %}{% endfor %}"
)
ENCODED = OBJECTS.replace(
    "{% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ v }}{% endfor %}", "{{ c.function | tojson }}"
)
TEXTS = OBJECTS.replace(
    "{% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ v }}{% endfor %}", "{{ '>' + c.function.arguments }}"
)
# Tool calls only where the content is null.
ELSE = "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
NULLS = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '' }}" + ELSE
DEVELOPER = "{% for m in messages %}{% if m.role == 'developer' %}DEV:{{ m.content }}" + ELSE


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_templates_have_what_they_are_written_for():
    template = ChatTemplate(
        {
            "default": "{{ bos_token }}{% for m in messages %}\n  {%- if loop.index > 2 %}{% break %}{% endif %}\n"
            "[{{ m.role ~ ': ' ~ m['content'] | trim }}]{% endfor %}{% generation %}{% endgeneration %}"
            "{{ '>' if add_generation_prompt }}{{ thinking | default('') }}{{ '{:>4}|{}'.format(7, 'x') }}",
            "tool_use": "{{ tools | tojson }} {{ documents is none }} {{ strftime_now('%Y') | length }}",
        },
        {"bos_token": "<s>"},
    )
    messages = [
        {"role": "user", "content": parts(" a", "b ")},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "c"},
    ]
    assert template.render(messages) == "<s>[user: a\nb][assistant: ]>   7|x"
    assert template.render(messages[:1], add_generation_prompt=False, thinking="!") == "<s>[user: a\nb]!   7|x"
    assert template.render(messages, tools=[{"name": "f<é>"}]) == '[{"name": "f<é>"}] True 4'
    with pytest.raises(RequestError, match="no chat template 'rag'; it has default, tool_use"):
        template.render(messages, template="rag")


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        (ROLES, chat(("developer", "d"), ("user", "u")), "[system]d[user]u[assistant]"),
        (ROLES, chat(("system", "s"), ("developer", "d"), ("user", "u")), "[system]s\nd[user]u[assistant]"),
        (DEVELOPER, chat(("developer", "d"), ("user", "u")), "DEV:d[user]u"),
        (STRICT, chat(("system", "s"), ("user", "u")), "<user>s\nu</><assistant>"),
        (STRICT, chat(("developer", "d"), ("user", parts("u", "v"))), "<user>d\nu\nv</><assistant>"),
        (
            STRICT,
            chat(("user", "u"), ("assistant", "a"), ("system", "s"), ("user", "v")),
            "<user>u</><assistant>a</><user>s\nv</><assistant>",
        ),
        (STRICT, chat(("system", "s")), "<user>s</><assistant>"),
        (PARTS, chat(("system", "s"), ("user", "u")), "[system](s)[user](u)"),
        (PARTS, chat(("user", parts("u", "v"))), "[user](u)(v)"),
        (OBJECTS, HISTORY, "[user]q[assistant]x=é[tool]21[user]r"),
        (ENCODED, HISTORY, '[user]q[assistant]{"name": "f", "arguments": {"x": "é"}}[tool]21[user]r'),
        (TEXTS, HISTORY, '[user]q[assistant]>{"x": "é"}[tool]21[user]r'),
        (NULLS, HISTORY, '[user]q{"x": "é"}[tool]21[user]r'),
        (NULLS, [HISTORY[0], {**HISTORY[1], "content": ""}], '[user]q{"x": "é"}'),
    ],
)
def test_chats_become_what_the_template_takes(source, messages, prompt):
    assert ChatTemplate(source).render(messages) == prompt


def test_tool_calls_and_results_are_never_dropped():
    prompt = ChatTemplate(STRICT).render(HISTORY)
    user, call, result, rest = prompt.split("</>")
    assert user == "<user>q" and rest == "<assistant>"
    # as TOOLS_TEXT asks for calls: a model imitates its history
    assert call == '<assistant><tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    told, asked = result.removeprefix("<user>").split("\n")
    assert json.loads(told) == {"tool_response": {"tool_call_id": "call00001", "content": "21"}} and asked == "r"


def test_arguments_that_are_no_json_reach_a_template_that_can_write_them():
    broken = [{**HISTORY[1], "tool_calls": [{"function": {"name": "f", "arguments": "{x:"}}]}]
    assert (
        ChatTemplate(ENCODED).render(broken, continue_final_message=False)
        == '[assistant]{"name": "f", "arguments": "{x:"}'
    )
    with pytest.raises(RequestError):
        ChatTemplate(OBJECTS).render(broken)


def test_a_last_message_of_the_assistant_is_continued():
    messages = chat(("user", "u"), ("assistant", " <think>a</> b "))
    template = ChatTemplate(ROLES + "{% if messages[-1].role == 'assistant' %}<|end|>{% endif %}")
    assert template.render(messages) == "[user]u[assistant] <think>a</> b "
    assert (
        template.render(messages, continue_final_message=True, add_generation_prompt=False)
        == "[user]u[assistant] <think>a</> b "
    )
    assert template.render(messages, add_generation_prompt=False) == "[user]u[assistant] <think>a</> b <|end|>"
    assert (
        template.render(messages, continue_final_message=False) == "[user]u[assistant] <think>a</> b [assistant]<|end|>"
    )
    assert ChatTemplate(STRICT).render(messages) == "<user>u</><assistant><think>a</> b ", (
        "space at the end is kept where the template trims"
    )
    assert ChatTemplate(PARTS).render(chat(("user", "u"), ("assistant", "a"))) == "[user](u)[assistant](a"
    forgets = ChatTemplate(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert forgets.render(messages) == "u> <think>a</> b "
    with pytest.raises(RequestError, match="needs a last message of the assistant"):
        template.render(messages[:1], continue_final_message=True)


def test_chatml():
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    assert (
        template.render(chat(("system", "s"), ("user", "u")))
        == "<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "message",
    [{"content": "x"}, "x", {"role": "user", "content": 3}, {"role": "user", "content": [{"type": "image_url"}]}],
)
def test_messages_of_the_wrong_form(message):
    with pytest.raises(RequestError) as error:
        ChatTemplate("x").render([message])
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% for x in", "template is broken"),
        ("{{" + "(" * 9000 + ")" * 9000 + "}}", "template is broken"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ ('{0.__class__.__mro__}'|attr('format'))('') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].role.x.y }}", "no attribute"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than"),
        ("{{ 1 // 0 }}", "fails on the messages"),
        ("{{ 'abcdef' | truncate(2) }}", "fails on the messages"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
    ],
)
def test_templates_reach_nothing_and_any_error_is_the_requests(source, message):
    with pytest.raises(RequestError, match=message) as error:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_long_template_is_a_model_file_error():
    with pytest.raises(ModelFileError, match="at most"):
        ChatTemplate("x" * (1 << 20))
