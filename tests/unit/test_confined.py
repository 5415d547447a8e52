"""Tokenizers in processes with limits: what comes back, what the rule of sizes promises, and what survives the end
of a process.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import ckdist
from ckdist.engine.messages import PromptScores
from ckdist.errors import EngineError, RequestError
from ckdist.serve.text_work import WORKERS, TextWork
from ckdist.tokens import confined, system_calls, worker_frames
from ckdist.tokens.confined import load_vocabulary
from ckdist.tokens.confined_template import ConfinedTemplate
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
from ckdist.tokens.tried import load_tried
from ckdist.tokens.vocabulary import Vocabulary
from tests.support.paths import GOLDEN as GOLDEN_FILES
from tests.support.paths import ROOT
from tests.support.programs import escape
from tests.support.served import serving, wait_for, write_tokenizer

BUNDLED = Path(ckdist.__file__).parent / "models" / "bundled"
GOLDEN = GOLDEN_FILES / "tokens"


pytestmark = pytest.mark.cold


@pytest.fixture(scope="module")
def tokenizers_of_kinds():
    metadata = [
        json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["metadata"] for name in ("bpe", "bpe_space")
    ]
    return [load_tokenizer(BUNDLED), *map(tokenizer_from_gguf, metadata)]


def test_a_vocabulary_is_what_the_tokenizer_decodes_with():
    own, sent = load_tokenizer(BUNDLED), load_vocabulary(BUNDLED)
    ids = own.encode("def f(x):\n    return 'é日😀'  # <|end|>")
    assert sent.decode(ids) == own.decode(ids) and sent.decode(ids, False) == own.decode(ids, False)
    assert list(sent.pieces) == list(own.pieces) and sent.token_bytes(-1) == sent.token_bytes(10**9) == b""
    assert (sent.special_ids, sent.bos_token_id, sent.eos_token_ids) == (
        own.special_ids,
        own.bos_token_id,
        own.eos_token_ids,
    )
    for data in (b"", b"\x80", sent.to_bytes()[:-1], Vocabulary(pieces=[], special_ids=frozenset()).to_bytes()):
        with pytest.raises(EngineError, match="malformed"):
            Vocabulary.from_bytes(data)


def test_a_tokenizer_is_tried_once_and_again_when_a_byte_changed(tmp_path, monkeypatch):
    tried, folder = [], tmp_path / "model"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(confined, "load_vocabulary", tried.append)
    folder.mkdir()
    write_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        load_tried(folder)
        assert load_tried(folder).encode("a") == load_tokenizer(folder).encode("a")
        (folder / name).write_text(((folder / name).read_text() if (folder / name).exists() else "{}") + " ")
    assert tried == [folder] * 3
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/dev/null")
    assert load_tried(folder) and load_tried(folder) and tried == [folder] * 5


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.sampled_from(["", " " * 40, "-" * 64, "e\u0301" * 20, "<|end|>" * 3]))
def test_no_text_has_fewer_tokens_than_its_size_says(tokenizers_of_kinds, text, run):
    for tokenizer in tokenizers_of_kinds:
        size = len((text + run).encode())
        assert len(tokenizer.encode(text + run, add_special=False)) * tokenizer.most_bytes_per_token >= size


def test_what_drops_characters_has_no_such_rule(tokenizers_of_kinds):
    metadata = json.loads((GOLDEN / "unigram.json").read_text(encoding="utf-8"))["metadata"]
    assert tokenizer_from_gguf(metadata).most_bytes_per_token is None


def test_scores_of_prompts_survive_the_way():
    entries = [None, [-0.5, [[7, -0.5], [8, -1.25]]], [float("-inf"), [[1, 0.0], [2, -3.0]]]]
    scores = PromptScores.pack(entries)
    assert [scores[i] for i in range(len(scores))] == entries
    with pytest.raises(ValueError, match="alternatives"):
        structs.replace(scores, width=3)


def test_the_server_survives_the_end_of_the_process_that_has_the_tokenizer():
    with serving() as (_, http):
        zygote = psutil.Process(http.pid).children()[0]
        workers = zygote.children()
        os.kill(zygote.pid, signal.SIGKILL)
        wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 5)
        wait_for(
            lambda: httpx.post(f"{http.url}/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200,
            30,
        )
        assert http.poll() is None
    wait_for(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.parametrize("whom", ["workers", "zygote"])
def test_a_killed_text_process_is_not_the_clients_mistake(whom):
    with serving() as (_, http):
        zygote = psutil.Process(http.pid).children()[0]
        wait_for(lambda: len(zygote.children()) == WORKERS, 20)
        workers, answers = zygote.children(), []
        for worker in workers:
            worker.suspend()
        body = {"prompt": "ab", "max_tokens": 1}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{http.url}/v1/completions", json=body, timeout=60))
        )
        client.start()
        time.sleep(0.5)  # the request lies with a worker
        for process in workers if whom == "workers" else [zygote]:
            process.kill()
        client.join()
        assert answers[0].status_code == 503 and "retry-after" in answers[0].headers, answers[0].text


def test_a_worker_that_ended_with_an_earlier_zygote_is_not_taken_for_one_of_the_next():
    async def scenario() -> None:
        text = TextWork(str(BUNDLED))
        await text.start()
        workers = [text._idle.get_nowait() for _ in range(WORKERS)]
        earlier = workers[0].zygote
        earlier.process.kill()
        earlier.process.wait()
        await text.start()
        try:
            assert all([await text._was_killed(worker) for worker in workers])
        finally:
            text.close()
            earlier.close()

    asyncio.run(scenario())


def test_nothing_is_left_of_a_server_that_was_killed():
    with serving() as (_, http):
        wait_for(lambda: len(psutil.Process(http.pid).children(recursive=True)) > 4, 20)
        left = psutil.Process(http.pid).children(recursive=True)
        os.kill(http.pid, signal.SIGKILL)
        wait_for(lambda: not any(process.is_running() and process.status() != "zombie" for process in left), 20)


@pytest.fixture(scope="module")
def escaped(tmp_path_factory):
    """What a worker answers that tries to get out, and the environment that it sees."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("HF_TOKEN", "secret")
    try:
        with confined.Zygote(BUNDLED, handler="tests.support.programs.escape:run") as zygote:
            zygote.load()
            _, connection = zygote.fork()
            worker_frames.send(connection, {"limits": [5, 256 << 20]}, b"")
            answer = worker_frames.receive(connection)
            connection.close()
    finally:
        patch.undo()
    assert answer is not None
    return answer[0]


@pytest.mark.skipif(not Path("/proc/sys/kernel/seccomp").exists(), reason="this kernel has no seccomp filters")
def test_a_worker_opens_nothing_starts_nothing_and_reaches_nobody(escaped):
    got = {name for name in escape.ATTEMPTS if escaped["found"][name] != "EPERM"}
    assert not got, {name: escaped["found"][name] for name in got}
    assert not any(escaped["found"][name] for name in escape.ALLOWED)


def test_a_worker_does_not_see_secrets_of_the_environment(escaped):
    assert "HF_TOKEN" not in escaped["environment"] and "TOKENIZERS_PARALLELISM" in escaped["environment"]


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_has_the_kernels_numbers(machine):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"no {header}")
    known = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text())}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    column = system_calls.MACHINES[machine][0]
    for name, numbers in {**system_calls.IN_MEMORY, **system_calls.LOADING}.items():
        assert numbers[column] == known.get(name, numbers[column]) and (numbers[column] is None) == (name not in known)


def test_a_chat_is_rendered_by_a_process_that_survives_its_template(tmp_path):
    shutil.copytree(BUNDLED, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{%- if messages[-1].content == 'loop' %}{%- for a in range(99999) %}{%- for b in range(99999) %}{%- endfor %}"
        "{%- endfor %}{%- endif %}{%- if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{%- endif %}"
        "{{- messages[-1].content + ' é😀' }}"
    )
    own = load_tokenizer(tmp_path / "model").chat_template
    assert own is not None
    with contextlib.closing(ConfinedTemplate(own, tmp_path / "model")) as template:
        for text, line in (("a", ""), ("loop", "takes too much time or memory"), ("no", "not this"), ("b", "")):
            messages = [{"role": "user", "content": text}]
            if line:
                with pytest.raises(RequestError, match=line):
                    template.render(messages)
            else:
                assert template.render(messages) == own.render(messages) == f"{text} é😀"
