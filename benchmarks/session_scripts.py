"""Conversations of agents for benchmarks/agent_sessions.py, and the chat templates that render them.

A script is a generator: it yields a `Turn`, and receives the message of the answer. Texts of users and tools are random
words of a fixed seed. Calls of tools are recorded ones, which the script adds to the answer.
"""

import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

WORDS = [
    "file", "line", "class", "test", "value", "name", "path", "list", "open",
    "read", "write", "index", "table", "index", "error", "count", "node", "tree",
]  # fmt: skip
SYSTEM_WORDS, QUESTION_WORDS, SHORT_RESULT, LONG_RESULT = 120, 30, (30, 80), (100, 160)
TURNS = 30

# The layouts of three published templates, with the marks of SmolLM2's vocabulary.
HERMES = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{{ '\n\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (  # a date, tools within the first question, contents without white space at their ends
    "{{ '<|im_start|>system\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}"
    "{{ date_string or '26 Jul 2024' }}{{ '\n\n' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{% endif %}{{ '<|im_end|>' }}{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<|im_start|>' + ('ipython' if m.role == 'tool' else m.role) + '\n\n' }}"
    "{% if tools and m.role == 'user' and loop.index0 < 2 %}{{ 'Answer with a call of one of these functions.\n\n' }}"
    "{% for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}{% endif %}"
    "{{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"parameters\": ' + c.function.arguments | tojson + '}' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
QWEN3 = (  # reasoning is kept after the last question alone
    "{{ '<|im_start|>system\n' + messages[0].content }}{% if tools %}{{ '\n\n# Tools\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{% endif %}"
    "{{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

Message = dict[str, Any]


class Turn(NamedTuple):
    """One request of a conversation."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []  # noqa: RUF012 - nothing changes it
    variables: dict[str, str] = {}  # noqa: RUF012 - of the template


Script = Generator[Turn, Message, None]


def words(rng: random.Random, count: int) -> str:
    """Returns `count` words in lines, like the output of a tool."""
    picked = [rng.choice(WORDS) + rng.choice(("", "", ".py", "(x)", ":")) for _ in range(count)]
    return "\n".join(" ".join(picked[at : at + 9]) for at in range(0, count, 9))


def tools_of(rng: random.Random, count: int = 6) -> list[dict[str, Any]]:
    """Returns functions with descriptions, in the format of requests."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    names = ("read_file", "write_file", "run_tests", "list_files", "search_text", "apply_patch")[:count]
    return [
        {"type": "function", "function": {"name": n, "description": words(rng, 10), "parameters": parameters}}
        for n in names
    ]


class Conversation:
    """The messages of one agent, which grow by answers, results of tools and questions."""

    def __init__(self, rng: random.Random, system: str) -> None:
        self.rng = rng
        self.messages: list[Message] = [{"role": "system", "content": system}]
        self._calls = 0
        self.ask()

    def ask(self) -> None:
        """Adds a question of the user."""
        self.messages.append({"role": "user", "content": words(self.rng, QUESTION_WORDS)})

    def call(self, answer: Message) -> None:
        """Adds the answer with a call of a tool, and its result."""
        self._calls += 1
        arguments = f'{{"path": "src/{self.rng.choice(WORDS)}.py", "line": {self.rng.randrange(1000)}}}'
        function = {"name": "read_file", "arguments": arguments}
        identity = f"call{self._calls:05}"
        call = {"id": identity, "type": "function", "function": function}
        sizes = LONG_RESULT if self.rng.random() < 0.25 else SHORT_RESULT
        result = words(self.rng, self.rng.randint(*sizes))
        self.messages.append({**answer, "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": identity, "name": "read_file", "content": result})

    def answered(self, answer: Message) -> None:
        """Adds the answer, and the user's next question."""
        self.messages.append(answer)
        self.ask()


def coding_agent(rng: random.Random) -> Script:
    """TURNS turns with tools: five calls after each question."""
    agent, tools = Conversation(rng, words(rng, SYSTEM_WORDS)), tools_of(rng)
    for number in range(TURNS):
        answer = yield Turn(list(agent.messages), tools)
        (agent.answered if number % 6 == 5 else agent.call)(answer)


def two_agents(rng: random.Random) -> Script:
    """Two agents with one system prompt, in turns."""
    system, tools = words(rng, SYSTEM_WORDS), tools_of(rng)
    agents = [Conversation(random.Random(seed), system) for seed in rng.sample(range(1000), 2)]
    for number in range(14):
        agent = agents[number % 2]
        answer = yield Turn(list(agent.messages), tools)
        agent.call(answer)


def branch(rng: random.Random) -> Script:
    """A conversation that goes on from another result of its fourth call, twice."""
    agent, tools = Conversation(rng, words(rng, SYSTEM_WORDS)), tools_of(rng)
    fourth: list[Message] = []
    for number in range(8):
        answer = yield Turn(list(agent.messages), tools)
        agent.call(answer)
        if number == 3:
            fourth = list(agent.messages)
    for _ in range(2):
        agent.messages = [*fourth[:-1], {**fourth[-1], "content": words(rng, LONG_RESULT[0])}]
        for _ in range(3):
            answer = yield Turn(list(agent.messages), tools)
            agent.call(answer)


def retry(rng: random.Random) -> Script:
    """Every second request is sent twice."""
    agent, tools = Conversation(rng, words(rng, SYSTEM_WORDS)), tools_of(rng)
    for number in range(8):
        turn = Turn(list(agent.messages), tools)
        answer = yield turn
        if number % 2:
            answer = yield turn
        agent.call(answer)


def tools_reordered(rng: random.Random) -> Script:
    """The client sends its tools in another order from the fifth turn on."""
    agent, tools = Conversation(rng, words(rng, SYSTEM_WORDS)), tools_of(rng)
    for number in range(8):
        if number == 4:
            tools = [*tools[3:], *tools[:3]]
        answer = yield Turn(list(agent.messages), tools)
        agent.call(answer)


def new_date(rng: random.Random) -> Script:
    """The date in the prompt changes after the fourth turn."""
    agent = Conversation(rng, words(rng, SYSTEM_WORDS))
    for number in range(8):
        date = "26 Nov 2026" if number < 4 else "27 Nov 2026"
        answer = yield Turn(list(agent.messages), variables={"date_string": date})
        agent.answered(answer)


def chat(rng: random.Random) -> Script:
    """Questions and answers without tools."""
    agent = Conversation(rng, words(rng, SYSTEM_WORDS))
    for _ in range(10):
        answer = yield Turn(list(agent.messages))
        agent.answered(answer)


class Session(NamedTuple):
    """A script with its template."""

    name: str
    template: str  # a name in TEMPLATES
    script: Callable[[random.Random], Script]


TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "qwen3": QWEN3}
SESSIONS = (
    Session("coding agent", "hermes", coding_agent),
    Session("two agents, one system prompt", "hermes", two_agents),
    Session("branch", "hermes", branch),
    Session("retry", "hermes", retry),
    Session("tools in another order", "hermes", tools_reordered),
    Session("coding agent", "llama3", coding_agent),
    Session("new date", "llama3", new_date),
    Session("coding agent, thinking", "qwen3", coding_agent),
    Session("chat, thinking", "qwen3", chat),
)
