"""Renders every chat template of a folder as the server does and as transformers does, and prints where they differ.

    python benchmarks/chat_templates.py FOLDER          # of *.jinja files, as llama.cpp's models/templates

Needs transformers. transformers gets each chat in its own form (tool calls with arguments as objects, parts joined),
the server in the form that OpenAI's clients send. "server keeps": transformers' prompt lacks the tool call or its
result, or says "None" for a null. Exit code 1 when a template that transformers renders is refused or rendered
otherwise.
"""

import argparse
import collections
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

from ckdist.errors import CkdistError
from ckdist.tokens.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}},
                "required": ["city"],
            },
        },
    }
]


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(arguments):
    return [{"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]


def history(arguments, content=""):
    return [
        said("user", "Weather in Zürich?"),
        said("assistant", content, tool_calls=call(arguments)),
        said("tool", '{"celsius": 21}', tool_call_id="call00001", name="get_weather"),
        said("assistant", "21 degrees."),
        said("user", "Thanks!"),
    ]


PLAIN = [said("user", 'Hello, <b>wörld</b> "quoted" 😀')]
TURNS = [said("user", "1+1?"), said("assistant", "2"), said("user", " and 2+2? \n")]
SYSTEM = [said("system", "Be brief."), *PLAIN]
AS_TEXT, AS_OBJECT = '{"city": "Zürich"}', {"city": "Zürich"}

# name: (what a client sends, what transformers gets, variables of both, variables of transformers alone)
CHATS = {
    "plain": (PLAIN, PLAIN, {}, {}),
    "turns": (TURNS, TURNS, {}, {}),
    "closed": (TURNS[:2], TURNS[:2], {"add_generation_prompt": False}, {}),
    "thinking off": (PLAIN, PLAIN, {"enable_thinking": False}, {}),
    "system": (SYSTEM, SYSTEM, {}, {}),
    "developer": ([said("developer", "Be brief."), *PLAIN], SYSTEM, {}, {}),
    "parts": (
        [said("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
        [said("user", "one\ntwo")],
        {},
        {},
    ),
    "tools": (PLAIN, PLAIN, {"tools": TOOLS}, {}),
    "tool history": (history(AS_TEXT), history(AS_OBJECT), {}, {}),
    "tool history, tools": (history(AS_TEXT), history(AS_OBJECT), {"tools": TOOLS}, {}),
    "tool history, null": (history(AS_TEXT, None), history(AS_OBJECT, None), {"tools": TOOLS}, {}),
    "continued": (TURNS[:2], TURNS[:2], {}, {"continue_final_message": True, "add_generation_prompt": False}),
}


def theirs(source: str, messages: list, variables: dict) -> str:
    variables = {"add_generation_prompt": True, **variables}
    tools = variables.pop("tools", None)
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=source, **variables, **SPECIAL)
    return rendered[0]


def reference(source: str, name: str, template: ChatTemplate) -> tuple[str | None, str]:
    """Transformers' prompt, or None and why it has none. A template that takes another form gets that form from its
    users.
    """
    _, messages, both, alone = CHATS[name]
    forms = [messages]
    if name.startswith("tool history"):
        forms.append(history(AS_TEXT, messages[1]["content"]))
        forms.append(history(AS_OBJECT, ""))
        if not template.traits().object_arguments:
            forms.insert(0, forms.pop(1))
    if name == "parts" and template.traits().parts:
        forms = [CHATS[name][0]]
    if name == "developer" and template.traits().developer:
        forms = [CHATS[name][0]]
    if not template.traits().text:
        forms = [
            [
                {
                    **m,
                    "content": [{"type": "text", "text": m["content"]}]
                    if isinstance(m["content"], str)
                    else m["content"],
                }
                for m in form
            ]
            for form in forms
        ]
    why = ""
    for form in forms:
        try:
            return theirs(source, form, {**both, **alone}), ""
        except Exception as error:
            why = why or " ".join(str(error).split())[:70] or type(error).__name__
    return None, why


def loses(prompt: str) -> bool:
    """Whether the prompt of a tool history lacks the call or its result, or has Python's word for null in it."""
    return (
        prompt.count("Zürich") + prompt.count("Z\\u00fcrich") < 2
        or "celsius" not in prompt
        or "None\n" in prompt
        or "None<" in prompt
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="print both prompts where they differ")
    options = parser.parse_args()
    counts: dict[str, collections.Counter] = {name: collections.Counter() for name in CHATS}
    wrong = 0
    for path in sorted(options.folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, SPECIAL)
        for name, (messages, _, variables, _) in CHATS.items():
            want, why = reference(source, name, template)
            try:
                got, reason = template.render(messages, **variables), ""
            except CkdistError as error:
                got, reason = None, str(error)
            if want is None:
                kind = "both refuse" if got is None else "only the server"
            else:
                kind = "same" if got == want else "refused" if got is None else "other"
                if kind == "other" and name.startswith("tool history") and loses(want) and not loses(got):
                    kind = "server keeps"
            counts[name][kind] += 1
            if kind in ("refused", "other"):
                wrong += 1
                print(f"{path.stem}, {name}: {kind} {reason}")
                if options.verbose:
                    print(
                        f"   transformers {json.dumps(want, ensure_ascii=False)}\n"
                        f"   the server   {json.dumps(got, ensure_ascii=False)}"
                    )
            elif kind == "only the server" and options.verbose:
                print(f"{path.stem}, {name}: transformers refuses ({why}); the server: {json.dumps(got)[:300]}")
            elif kind == "both refuse" and options.verbose:
                print(f"{path.stem}, {name}: both refuse ({why}); {reason}")
    kinds = ("same", "only the server", "server keeps", "both refuse", "refused", "other")
    print(f"{'chat':22s}" + "".join(f"{kind:>17s}" for kind in kinds))
    for name, counter in counts.items():
        print(f"{name:22s}" + "".join(f"{counter[kind]:17d}" for kind in kinds))
    return 1 if wrong else 0


sys.exit(main())
