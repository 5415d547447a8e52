"""Tokens that a server computes for prompts of agents, over the tokens that it had to compute.

    python benchmarks/agent_sessions.py [--models dense,hybrid] [--llama-server PROGRAM] [--hybrid FILE.gguf]
        [--only NAME] [--json] [-v]

It serves SmolLM2 (`ckdist pull smollm2`) and a tiny Qwen3-Next with random weights on 127.0.0.1, each with three chat
templates, and plays the sessions of benchmarks/session_scripts.py over HTTP. Answers are greedy and made of common
words, so that the text of an answer has the same tokens in the next prompt.

A prompt's token has to be computed if it comes after the longest common prefix with any prompt and answer before it;
at least the last token has to be. A server computes those that `cached_tokens` of the usage leaves out. llama-server
does not return token ids: its prompts come from /apply-template and are tokenised, and its answers from their text.
It plays the hybrid's sessions only with --hybrid, a Qwen3-Next in a GGUF file with SmolLM2's tokenizer. Keys and values
of linear attention must have the same width there.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import gguf
import httpx
import numpy as np
from safetensors.numpy import load_file, save_file
from session_scripts import SESSIONS, TEMPLATES, WORDS, Message, Session, Turn

from ckdist.hub.resolve import resolve
from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
from ckdist.weights.gguf import read_gguf

CONTEXT, ANSWER_TOKENS, THINKING_TOKENS = 8192, 40, 24
START_SECONDS, REQUEST_SECONDS, STOP_SECONDS = 180.0, 600.0, 30.0
TEMPLATE_KEY = "tokenizer.chat_template"
ANSWER = f'root ::= word (" " word){{12,30}}\nword ::= {" | ".join(json.dumps(word) for word in sorted(set(WORDS)))}'
HYBRID = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "qwen3next"  # four layers, random weights


class Answered(NamedTuple):
    """One request: its prompt and answer as token ids, the tokens that came from a cache, and the message."""

    prompt: list[int]
    answer: list[int]
    cached: int
    message: Message


class Totals(NamedTuple):
    """Sums over the requests of a session."""

    requests: int = 0
    prompt: int = 0
    needed: int = 0
    computed: int = 0
    missed: int = 0  # tokens of the longest common prefix that were computed again, beyond one block a request


class Server:
    """A server of ckdist."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=REQUEST_SECONDS)
        ids = [self.tokens(text) for word in sorted(set(WORDS)) for text in (word, f" {word}")]
        self.bias = {str(word[0]): 50 for word in ids if len(word) == 1}

    def tokens(self, text: str) -> list[int]:
        """Returns the ids of a text that may have control tokens."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return self.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]

    def body(self, turn: Turn) -> dict[str, Any]:
        """Returns the request for a turn."""
        body: dict[str, Any] = {
            "messages": turn.messages,
            "max_tokens": ANSWER_TOKENS + THINKING_TOKENS,
            "temperature": 0,
            "grammar": ANSWER,
            "logit_bias": self.bias,
            "thinking_budget_tokens": THINKING_TOKENS,
            "return_token_ids": True,
        }
        more = {"tools": turn.tools} if turn.tools else {}
        return body | more | ({"chat_template_kwargs": turn.variables} if turn.variables else {})

    def ask(self, turn: Turn) -> Answered:
        """Sends a turn."""
        answer = self._send(self.body(turn))
        usage, choice = answer["usage"], answer["choices"][0]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answered(answer["prompt_token_ids"], choice["token_ids"], cached, kept(choice["message"]))

    def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        got = self.http.post("/v1/chat/completions", json=body)
        if got.status_code != 200:
            sys.exit(f"the server answers {got.status_code}: {got.text[:400]}")
        return got.json()


class LlamaServer(Server):
    """llama-server, which refuses a grammar with tools. So it gets the rendered chat, and its answers do not think."""

    def ask(self, turn: Turn) -> Answered:
        """Sends a turn."""
        body = self.body(turn)
        form = {name: body[name] for name in ("messages", "tools", "chat_template_kwargs") if name in body}
        rendered = self._answer("/apply-template", form)["prompt"]
        bias = [[int(token), value] for token, value in self.bias.items()]
        more = {"grammar": ANSWER, "logit_bias": bias, "temperature": 0, "n_predict": ANSWER_TOKENS}
        answer = self._answer("/completion", {"prompt": rendered, **more})
        prompt, whole = self.tokens(rendered), self.tokens(rendered + answer["content"])
        message = {"role": "assistant", "content": answer["content"]}
        return Answered(prompt, whole[len(prompt) :], len(prompt) - answer["timings"]["prompt_n"], message)

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        got = self.http.post(path, json=body)
        if got.status_code != 200:
            sys.exit(f"llama-server answers {got.status_code}: {got.text[:400]}")
        return got.json()


def kept(message: Message) -> Message:
    """Returns the fields of an answer that clients send again."""
    return {name: message[name] for name in ("role", "content", "reasoning_content") if message.get(name)}


def common(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the length of the longest common prefix."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


def play(server: Server, session: Session, history: list[np.ndarray], verbose: bool) -> Totals:
    """Plays one session. `history`: the tokens of all requests so far, which grows."""
    script, totals = session.script(random.Random(session.name + session.template)), Totals()
    turn = next(script)
    with contextlib.suppress(StopIteration):
        while True:
            got = server.ask(turn)
            prompt = np.array(got.prompt)
            shared = max((common(prompt, before) for before in history), default=0)
            needed, computed = max(1, len(prompt) - shared), len(prompt) - got.cached
            missed = max(0, shared - got.cached - 16)
            if verbose:
                print(f"    {len(prompt):5} prompt {needed:5} needed {computed:5} computed {missed:5} missed")
            history.append(np.array(got.prompt + got.answer))
            new = (1, len(prompt), needed, computed, missed)
            totals = Totals(*(a + b for a, b in zip(totals, new, strict=True)))
            turn = script.send(got.message)
    return totals


def write_gguf(source: pathlib.Path, template: str, path: pathlib.Path) -> None:
    """Writes a GGUF file with another chat template."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", TEMPLATE_KEY):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hybrid(source: pathlib.Path, template: str, folder: pathlib.Path) -> None:
    """Writes a tiny Qwen3-Next with random weights and SmolLM2's tokenizer."""
    tokenizer = tokenizer_from_gguf(read_gguf(source).metadata)
    more = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": CONTEXT}
    config = json.loads((HYBRID / "config.json").read_text()) | more
    arrays, rng = load_file(HYBRID / "model.safetensors"), np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[name] = rng.standard_normal((tokenizer.vocab_size, config["hidden_size"]), np.float32)
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


@contextlib.contextmanager
def running(words: list[str], log: pathlib.Path) -> Iterator[str]:
    """Runs a server on a free port. Yields its URL once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = subprocess.Popen([*words, "--port", str(port)], stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(url):
            if time.monotonic() > end or process.poll() is not None:
                sys.exit(f"{words[0]} does not start: {log.read_text()[-500:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


def answers(url: str) -> bool:
    """Whether the server is ready."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    """Plays the sessions and prints a row for each."""
    parser = argparse.ArgumentParser(description="Tokens computed for prompts of agents, over those that had to be")
    parser.add_argument("--models", default="dense,hybrid", help="dense, hybrid, or both")
    parser.add_argument("--llama-server", help="the program, to play the same sessions with its defaults")
    parser.add_argument("--hybrid", type=pathlib.Path, help="a GGUF file in place of the Qwen3-Next of ours")
    parser.add_argument("--only", default="", help="only sessions whose name or template contains this")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each request")
    given = parser.parse_args()
    rows: list[list[Any]] = []
    for model in given.models.split(","):
        for template in TEMPLATES:
            sessions = [s for s in SESSIONS if s.template == template and given.only in f"{s.name} {s.template}"]
            if sessions:
                rows += play_all(given, model, template, sessions)
    if given.json:
        print(json.dumps(rows, indent=2))


def play_all(given: argparse.Namespace, model: str, template: str, sessions: list[Session]) -> list[list[Any]]:
    """Plays sessions of one template on each server, and returns their rows."""
    source = pathlib.Path(resolve("smollm2"))
    in_gguf = source if model == "dense" else given.hybrid
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name) / ("model.gguf" if in_gguf else "model")
        (write_gguf if in_gguf else write_hybrid)(in_gguf or source, TEMPLATES[template], path)
        ours = [sys.executable, "-m", "ckdist.cli.main", "serve", "-m", str(path), "-c", str(CONTEXT)]
        servers: list[tuple[str, type[Server], list[str]]] = [("ckdist", Server, ours)]
        if given.llama_server and in_gguf:
            peer = [given.llama_server, "-m", str(path), "--jinja", "-c", "0"]
            servers.append(("llama-server", LlamaServer, peer))
        for server_name, kind, words in servers:
            with running(words, pathlib.Path(name) / "log") as url:
                server, history = kind(url), list[np.ndarray]()
                for session in sessions:
                    totals = play(server, session, history, given.verbose)
                    row = [server_name, model, template, session.name, *totals]
                    row.append(round(totals.computed / totals.needed, 3))
                    rows.append(row)
                    print(*row, sep=" | ", file=sys.stderr if given.json else sys.stdout, flush=True)
    return rows


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
