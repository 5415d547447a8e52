"""`ckdist chat`: a chat on the terminal. Each line of a pipe is a question."""

import contextlib
import pathlib
import signal
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import FrameType

from ckdist.cli.chat_server import ServerChat
from ckdist.cli.generate import sampling_of
from ckdist.cli.line_input import LineInput
from ckdist.cli.session import model_session
from ckdist.config.chat_config import ChatConfig
from ckdist.engine.llm import LLM
from ckdist.engine.model_engine import make_engine
from ckdist.errors import ConfigError, RequestError, one_line
from ckdist.terminal import is_terminal, styled
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.confined_template import ConfinedTemplate
from ckdist.tokens.tokenizer import Tokenizer

HELP = """\
/help           this list
/clear          forget the chat, but not the system message
/system TEXT    set the system message, and forget the chat
/retry          answer the last question again
/undo           forget the last question and its answer
/save FILE      write the chat as JSON, a list of messages
/quit           leave, as Ctrl-D does
A line that ends with a backslash goes on in the next. Ctrl-C ends an answer."""

Message = dict[str, str]


class EngineChat:
    """Answers from a model in this process. The cache keeps a chat's prefix, so a turn computes only its new tokens."""

    def __init__(self, llm: LLM, tokenizer: Tokenizer, template: ChatTemplate, config: ChatConfig, name: str) -> None:
        self.name = name
        self._llm, self._config, self._sampling = llm, config, sampling_of(config)
        self._tokenizer, self._template = tokenizer, template

    def answers(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yields the next answer in pieces. Raises RequestError if the chat is longer than the context."""
        prompt = self._tokenizer.chat_tokens(messages, self._config.special_tokens_in_text, self._template)
        yield from self._llm.stream(prompt, self._sampling, stop=self._config.stop)


class Chat:
    """A chat: its messages, and the source of its answers."""

    def __init__(self, source: EngineChat | ServerChat, system: str | None) -> None:
        self.source, self.system = source, system
        self.messages: list[Message] = []

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yields the answer in pieces. An interrupted answer is kept. A RequestError leaves the chat as it was."""
        self.messages.append({"role": "user", "content": question})
        before = [{"role": "system", "content": self.system}] if self.system else []
        answer = ""
        try:
            for piece in self.source.answers(before + self.messages):
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def undo(self) -> str | None:
        """Removes the last question and its answer. Returns the question, or None if there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None


class Interrupt:
    """Records Ctrl-C in `pressed` while an answer is generated. An exception would interrupt a step of the engine."""

    def __init__(self) -> None:
        self.pressed = False

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        self.pressed = True

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def say(text: str) -> None:
    """Prints a line to standard error, so that standard output has only answers."""
    print(styled(text, "quiet", sys.stderr), file=sys.stderr, flush=True)


def answer(chat: Chat, question: str) -> None:
    """Prints an answer while it is generated. A refused request becomes one line."""
    pieces = chat.ask(question)
    with Interrupt() as interrupt, contextlib.closing(pieces):
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                if interrupt.pressed:
                    print(" …", end="")
                    break
        except RequestError as error:
            say(f"{error}; /clear forgets the chat, /undo its last question")
            return
    print(flush=True)


def obey(chat: Chat, line: str) -> bool:
    """Runs a line that begins with a slash. Returns False for /quit."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/quit", "/exit"):
        return False
    if word == "/clear":
        chat.messages.clear()
    elif word == "/system":
        chat.system = rest or None
        chat.messages.clear()
    elif word == "/undo":
        if chat.undo() is None:
            say("nothing to forget")
    elif word == "/retry":
        question = chat.undo()
        if question is None:
            say("no question to answer again")
        else:
            answer(chat, question)
    elif word == "/save":
        save(chat, rest)
    else:
        say(HELP if word == "/help" else f"{word} is unknown; the commands are:\n{HELP}")
    return True


def save(chat: Chat, path: str) -> None:
    """Writes the chat as JSON. Prints one line if the file cannot be written."""
    import json

    before = [{"role": "system", "content": chat.system}] if chat.system else []
    text = json.dumps(before + chat.messages, ensure_ascii=False, indent=1) + "\n"
    try:
        pathlib.Path(path).write_bytes(text.encode(errors="replace"))  # a pipe may bring what is no text
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = getattr(error, "strerror", None) or error
        say(f"{path or 'no file'} could not be written: {why}; /save FILE names another")


def converse(chat: Chat, lines: LineInput) -> None:
    """Reads questions and prints answers until the input ends."""
    if is_terminal(sys.stdin):
        say(f"{one_line(chat.source.name)}. /help lists the commands, Ctrl-D leaves.")
    for line in lines:
        if line.startswith("/"):
            if not obey(chat, line):
                return
        elif line.strip():
            answer(chat, line)


def run(config: ChatConfig) -> int:
    """Chats until the input ends. Returns 0."""
    if config.url is not None:
        converse(Chat(ServerChat(config), config.system), LineInput())
        return 0
    with model_session(config) as model:
        if model is None:
            return 0
        engine, tokenizer = make_engine(model, config)
        checkpoint, llm = model.checkpoint, LLM.from_engine(engine, tokenizer)
        name = pathlib.Path(checkpoint.path).name
        if tokenizer.chat_template is None:
            raise ConfigError(f"{name} has no chat template: use ckdist generate, or a model that chats")
        template = ConfinedTemplate(tokenizer.chat_template, checkpoint.path, checkpoint.overrides)
        with contextlib.closing(template):
            converse(
                Chat(EngineChat(llm, tokenizer, template, config, name), config.system),
                LineInput(),
            )
        llm.close()
    return 0
