"""`ckdist chat`: over the engine, over a server, and what is typed into it."""

import http.server
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time

import pytest

from ckdist.cli.chat import Chat, answer, obey
from ckdist.cli.chat_server import ServerChat, request_fields
from ckdist.config.chat_config import ChatConfig
from ckdist.errors import ConfigError, EngineError, RequestError
from tests.support.local_server import running

COMMAND = [sys.executable, "-m", "ckdist.cli.main", "chat"]
SMALL = ["-t", "1", "-c", "256", "-n", "8", "--temp", "0"]


class Echo:
    """Answers with the number of messages and the last one's text; refuses a chat that says so."""

    name = "echo"

    def answers(self, messages):
        if "too long" in messages[-1]["content"]:
            raise RequestError("the prompt has 9 tokens, and the context 8")
        yield f"{len(messages)}:"
        yield messages[-1]["content"]


def test_a_chat_has_a_history_that_commands_change(capsys, tmp_path):
    chat = Chat(Echo(), "be brief")
    answer(chat, "one")
    answer(chat, "too long")
    answer(chat, "two")
    assert obey(chat, "/retry") and obey(chat, "/undo") and obey(chat, f"/save {tmp_path}/chat.json")
    out, err = capsys.readouterr()
    assert out.splitlines() == ["2:one", "4:two", "4:two"]
    assert "the context 8" in err and "/clear" in err
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [m["content"] for m in saved] == ["be brief", "one", "2:one"]
    chat.messages.append({"role": "user", "content": "a\udcffb"})  # of a pipe
    assert obey(chat, f"/save {tmp_path}/chat.json") and "a?b" in (tmp_path / "chat.json").read_text()
    assert obey(chat, "/save a\0b") and "could not be written" in capsys.readouterr().err
    assert obey(chat, "/clear") and not chat.messages and chat.system == "be brief"
    assert obey(chat, "/system") and chat.system is None and obey(chat, "/undo") and obey(chat, "/what")
    assert obey(chat, "/save /nonexistent/file") and not obey(chat, "/quit")
    assert "could not be written" in capsys.readouterr().err


def test_lines_of_a_pipe_are_questions():
    lines = "def main(\nwhat is\\\na list\n/quit\nnever\n"
    done = subprocess.run([*COMMAND, *SMALL], input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("\n") >= 2 and "\x1b" not in done.stdout + done.stderr
    again = subprocess.run([*COMMAND, *SMALL], input=lines, capture_output=True, text=True, timeout=120)
    assert again.stdout == done.stdout


def test_on_a_terminal_an_answer_comes_and_ctrl_c_ends_it(tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    words = [*COMMAND, "-t", "1", "-c", "1024", "-n", "900", "--temp", "0", "--ignore-eos", "--spec", "off"]
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    text = b""

    def until(word: bytes) -> bytes:
        nonlocal text
        limit = time.monotonic() + 60
        while word not in text:
            assert time.monotonic() < limit and select.select([ours], [], [], 60)[0], text
            text += os.read(ours, 4096)
        before, _, text = text.partition(word)
        return before

    def interrupted() -> bool:
        """False: the answer ended before the signal came."""
        os.write(ours, b"Hello\n")
        until(b"Hello\r\n")
        until(b" ")
        process.send_signal(2)
        return "…".encode() in until(b"> ")

    try:
        until(b"Ctrl-D leaves")
        until(b"> ")
        assert any(interrupted() for _ in range(5))
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
    history = tmp_path / "ckdist" / "chat_history"
    assert "Hello" in history.read_text() and history.stat().st_mode & 0o077 == 0


DEEP = "[" * 60_000  # JSON that is nested too deep to be read


class Handler(http.server.BaseHTTPRequestHandler):
    """A server with the OpenAI API that streams three pieces, and keeps what it was asked."""

    asked: list = []

    def log_message(self, *words) -> None:
        pass

    def do_GET(self):
        listed = DEEP if self.path.startswith("/deep") else json.dumps({"data": [{"id": "a-model"}]})
        self.reply(404 if self.path.startswith("/deep/none") else 200, listed)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self.reply(400, json.dumps({"error": {"message": "no\x1b[31m such thing"}}))
            return
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in ("Hel", "lo", None)]
        if text == "break":
            events[1:] = [{"error": {"message": "rank 1 is gone"}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        if text == "half":
            lines = ['data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n']
        if text == "deep":
            lines = [f"data: {DEEP}\n\n"]
        self.reply(200, ": a comment\n\n" + "".join(lines) + "data: [DONE]\n\n")

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture(scope="module")
def url():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_answers(url):
    chat = ServerChat(ChatConfig(url=f"{url}/v1/", api_key="secret", temperature=0.5, n_predict=9, stop=("END",)))
    assert chat.name == "a-model"
    assert list(chat.answers([{"role": "user", "content": "hi"}])) == ["Hel", "lo"]
    assert list(chat.answers([{"role": "user", "content": "half"}])) == ["?"]
    Handler.asked.pop()
    path, key, body = Handler.asked[-1]
    assert (path, key, body["model"], body["stream"]) == ("/v1/chat/completions", "Bearer secret", "a-model", True)
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.5, 9, ["END"]) and "top_k" not in body


def test_what_a_server_refuses_is_one_clean_line(url):
    chat = ServerChat(ChatConfig(url=url))
    with pytest.raises(RequestError, match=r"answers 400: no \[31m such thing$"):
        list(chat.answers([{"role": "user", "content": "refuse"}]))
    with pytest.raises(EngineError, match="rank 1 is gone"):
        list(chat.answers([{"role": "user", "content": "break"}]))
    with pytest.raises(EngineError, match="broke off"):
        list(chat.answers([{"role": "user", "content": "deep"}]))
    with pytest.raises(EngineError, match="does not list its models"):
        ServerChat(ChatConfig(url=f"{url}/deep"))
    with pytest.raises(RequestError, match="answers 404"):
        ServerChat(ChatConfig(url=f"{url}/deep/none"))
    with pytest.raises(EngineError, match="is a server running there"):
        ServerChat(ChatConfig(url="http://127.0.0.1:9"))
    for wrong in ({"url": "localhost:8080"}, {"url": url, "model": "x"}):
        with pytest.raises(ConfigError, match="--url"):
            ChatConfig(**wrong)


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_that_breaks_off_is_one_line(status):
    broken = status, {"Transfer-Encoding": "chunked"}, b"no length\r\n"
    with running(lambda path, headers: broken) as server, pytest.raises(EngineError, match="broke off"):
        ServerChat(ChatConfig(url=server.url))


def test_flags_that_were_given_are_the_fields_of_a_request():
    assert request_fields(ChatConfig()) == {"max_tokens": 1024}
    fields = request_fields(ChatConfig(top_k=5, seed=7, dry_sequence_breakers=("x",)))
    assert fields == {"max_tokens": 1024, "top_k": 5, "seed": 7, "dry_sequence_breakers": ["x"]}
