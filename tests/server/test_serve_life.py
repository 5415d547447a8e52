"""The HTTP process's life: loading, draining, a silent, failed or killed rank 0, a taken port."""

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from ckdist.cli.server_start import Listeners, open_line, open_listeners
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.messages import Submit, pack_tokens
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import ConfigError, EngineError, RequestError
from ckdist.hub.bundled import BUNDLED
from ckdist.serve import body, heartbeat
from ckdist.serve.addresses import listen, url_of
from ckdist.serve.api_keys import ApiKey
from ckdist.serve.engine_client import EngineClient, new_id
from ckdist.serve.problems import Problem
from ckdist.serve.process import HttpProcess
from ckdist.serve.settings import HttpSettings
from tests.support.clients import openai
from tests.support.fake_engine import FakeEngine
from tests.support.launcher import environment
from tests.support.served import VOCAB, serving, wait_for, write_tokenizer


def status(http, path="/health"):
    return httpx.get(f"{http.url}{path}").status_code


def in_background(function):
    """Runs `function` in a thread; the list gets its result, or the exception that it raised."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    threading.Thread(target=run, daemon=True).start()
    return results


def stream_text(http, tokens):
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="m", prompt="ab", max_tokens=tokens, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)


def test_health_follows_the_engine_and_a_failure_ends_what_runs():
    with serving() as (engine, http):
        engine.state = "loading"
        wait_for(lambda: status(http) == 503)
        engine.state, engine.delay = "ready", 0.02
        wait_for(lambda: status(http) == 200)
        running = in_background(lambda: stream_text(http, 200))
        whole = in_background(
            lambda: httpx.post(f"{http.url}/v1/completions", json={"prompt": "ab", "max_tokens": 200})
        )
        wait_for(lambda: engine.running == 2)
        time.sleep(0.1)
        engine.error, engine.state = "rank 1 died in step 7", "failed"
        wait_for(lambda: running and whole, 3)
        assert isinstance(running[0], openai.APIError) and "rank 1 died in step 7" in str(running[0])
        assert whole[0].status_code == 503 and "rank 1 died in step 7" in whole[0].text
        assert status(http) == 503 and status(http, "/metrics") == 200


def test_a_silent_engine_is_stale_and_may_come_back(tmp_path):
    async def until(condition):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def scenario(engine):
        client = EngineClient(engine.endpoint, stale_seconds=0.3)
        client.start()
        try:
            await asyncio.wait_for(until(lambda: client.state == "ready"), 5)
            engine.delay = 0.02
            with client.generation() as generation:
                generation.submit(0, Submit(new_id(), pack_tokens([5, 6]), SamplingParams(max_tokens=1000)))
                assert (await generation.next())[0][1].tokens == [5]
                engine.silent = True
                with pytest.raises(Problem, match=r"no sign of life for 0.3 seconds") as problem:
                    while True:
                        await asyncio.wait_for(generation.next(), 5)
                assert problem.value.status == 503 and client.state == "stale"
            assert client.active == 0
            engine.silent = False
            await asyncio.wait_for(until(lambda: client.state == "ready"), 5)
            await asyncio.wait_for(until(lambda: engine.aborted), 5)
        finally:
            client.close()

    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB) as engine:
        asyncio.run(scenario(engine))
        assert len(engine.aborted) == 1


def test_nothing_progresses_is_504():
    with serving(timeout=1.0) as (engine, http):
        engine.delay = 2.5
        assert httpx.post(f"{http.url}/v1/completions", json={"prompt": "ab"}, timeout=10).status_code == 504


@pytest.mark.parametrize("by", ["signal", "engine"])
def test_draining_lets_running_requests_finish(by):
    with serving() as (engine, http):
        engine.delay = 0.01
        running = in_background(lambda: stream_text(http, 100))
        wait_for(lambda: engine.running == 1)
        if by == "signal":
            http.drain()
            wait_for(lambda: engine.drained)
        else:
            engine.state = "draining"
        wait_for(lambda: httpx.post(f"{http.url}/v1/completions", json={"prompt": "a"}).status_code == 503)
        assert http.poll() is None and not running
        wait_for(lambda: running)
        assert running == ["ab" * 50]
        wait_for(lambda: http.poll() is not None, 5)
        assert http.poll() == 0


def test_a_drain_at_its_limit_gives_what_requests_have():
    ask_for = {"prompt": "ab", "max_tokens": 250}
    with serving(drain_timeout=0.3) as (engine, http):
        engine.delay = 0.05
        post = lambda more: httpx.post(f"{http.url}/v1/completions", json={**ask_for, **more}, timeout=20)
        whole = in_background(lambda: post({}))
        streamed = in_background(lambda: post({"stream": True, "stream_options": {"include_usage": True}}))
        wait_for(lambda: engine.running == 2)
        time.sleep(0.5)
        assert http.stop(5) == 0
        wait_for(lambda: whole and streamed)
    answer = whole[0].json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert choice["finish_reason"] == "length" and "ab" * 2 in choice["text"]
    assert usage["prompt_tokens"] == 2 and usage["completion_tokens"] == len(choice["text"])
    *chunks, last, end = streamed[0].text.strip().split("\n\n")
    assert end == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] > 4
    assert json.loads(chunks[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_drain_at_its_limit_refuses_what_has_no_token_yet():
    with serving(drain_timeout=0.2) as (engine, http):
        engine.silent = True
        running = in_background(lambda: ask(http.url, timeout=20))
        wait_for(lambda: engine.submitted)
        assert http.stop(5) == 0
        wait_for(lambda: running)
        assert running[0].status_code == 503 and "shutting down" in running[0].text


def test_stopping_what_already_drains_is_no_second_word():
    """A second signal from the user means at once; rank 0 stops the process as soon as its own work is done, while
    the last words still go out.
    """
    with serving() as (engine, http):
        engine.delay = 0.02
        running = in_background(lambda: stream_text(http, 30))
        wait_for(lambda: engine.running == 1)
        http.drain()
        time.sleep(0.1)  # two signals at once are one
        assert http.stop(10) == 0
        wait_for(lambda: running)
        assert isinstance(running[0], str), running[0]


RANK0 = """
import sys
from ckdist.config.serve_config import ServeConfig
from ckdist.serve.addresses import listen
from ckdist.serve.process import HttpProcess
from tests.support.fake_engine import FakeEngine
endpoint, folder, vocab = sys.argv[1:]
with FakeEngine(endpoint, int(vocab)) as engine:
    engine.delay = 0.02
    http = HttpProcess.start(ServeConfig(port=0), endpoint, folder, "bytes", listen("127.0.0.1", 0))
    print(http.pid, http.url, flush=True)
    sys.stdin.read()
"""


def test_a_killed_rank_0_is_answered_for_and_then_mourned_no_longer(tmp_path):
    folder = write_tokenizer(tmp_path)
    (tmp_path / "rank0").mkdir()
    rank0 = subprocess.Popen(
        [sys.executable, "-c", RANK0, f"ipc://{tmp_path}/rank0/engine", str(folder), str(VOCAB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, url = rank0.stdout.readline().split()
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
    running = in_background(
        lambda: httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 250}, timeout=20)
    )
    time.sleep(0.3)
    rank0.kill()
    rank0.wait()
    begun = time.monotonic()
    wait_for(lambda: running, 2)
    assert running[0].status_code == 503 and "rank 0 has ended" in running[0].text
    assert httpx.get(f"{url}/health").status_code == 503
    wait_for(lambda: not _alive(int(pid)), 9)
    assert time.monotonic() - begun > 1 and not (tmp_path / "rank0").exists()


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_tokenizer_that_does_not_load_ends_the_process(tmp_path):
    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB):
        http = HttpProcess.start(
            ServeConfig(port=0), f"ipc://{tmp_path}/engine", str(tmp_path), "x", listen("127.0.0.1", 0)
        )
        try:
            wait_for(lambda: "the tokenizer does not load" in httpx.get(f"{http.url}/health").text)
        finally:
            assert http.stop() == 1


def test_drained_before_it_can_handle_signals(tmp_path):
    http = HttpProcess.start(ServeConfig(port=0), f"ipc://{tmp_path}/engine", str(BUNDLED), "x", listen("127.0.0.1", 0))
    http.drain()
    wait_for(lambda: http.poll() is not None)
    assert http.poll() == 0


def test_a_taken_port_and_an_unknown_host():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        said = pytest.raises(ConfigError, match=f"port {port}: Address already in use; choose another")
        with said:
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host \(no such host\) is not known"):
        listen("no such host", 0)


@pytest.mark.parametrize(
    "host, flags, warned",
    [("0.0.0.0", {}, True), ("0.0.0.0", {"api_key": "k"}, False), ("127.0.0.1", {}, False), ("::1", {}, False)],
)
def test_a_server_open_to_all_warns(host, flags, warned):
    with listen(host, 0) as listener:
        line = open_line(ServeConfig(host=host, **flags), Listeners(listener, None))
        assert (line is not None) == warned and (not warned or ("0.0.0.0" in line and "--api-key" in line))


def test_an_address_beyond_this_host_needs_a_key_or_no_auth():
    """The image and other recipes name 0.0.0.0: without a key they do not start."""
    with pytest.raises(ConfigError, match=r"any client that reaches 0\.0\.0\.0 .*--no-auth serves without one"):
        open_listeners(ServeConfig(host="0.0.0.0", port=0))
    for flags in ({"host": "0.0.0.0", "no_auth": True}, {"host": "0.0.0.0", "api_key": "k"}, {}):
        listeners = open_listeners(ServeConfig(port=0, **flags))
        listeners.http.close()
        assert listeners.metrics is None
    with pytest.raises(ConfigError, match="--no-auth and --api-key contradict"):
        ServeConfig(no_auth=True, api_key="k")


@pytest.mark.parametrize("name", ["model", "alias"])
def test_a_name_that_is_no_unicode_is_refused(name):
    with pytest.raises(ConfigError, match=r"cannot name the model 'a\\udcff'"):
        ServeConfig(**{name: "a\udcff"})


def test_probes_and_a_port_for_metrics_need_no_key():
    """While the model loads, while it serves, and while it drains; the port for metrics serves nothing else."""
    with listen("127.0.0.1", 0) as metrics, serving(api_key="k", metrics=metrics) as (engine, http):
        watched = url_of(metrics)
        engine.state = "loading"
        wait_for(lambda: status(http, "/readyz") == 503)
        assert status(http, "/livez") == 200 and status(http, "/metrics") == status(http, "/v1/models") == 401
        assert httpx.get(f"{watched}/readyz").status_code == 503
        engine.state = "ready"
        wait_for(lambda: status(http, "/readyz") == 200)
        assert "ckdist_state" in httpx.get(f"{watched}/metrics").text
        assert httpx.get(f"{watched}/livez").status_code == 200
        for path in ("/", "/health", "/v1/models", "/v1/machine"):
            assert httpx.get(f"{watched}{path}").status_code == 404
        engine.delay = 0.02
        running = in_background(
            lambda: httpx.post(
                f"{http.url}/v1/completions", json={"prompt": "ab", "max_tokens": 99}, headers={"x-api-key": "k"}
            )
        )
        wait_for(lambda: engine.running == 1)
        http.drain()
        wait_for(lambda: status(http, "/readyz") == 503)
        assert status(http, "/livez") == 200 and not running


def test_the_port_is_free_once_the_process_ends():
    with serving() as (_, http):
        port = int(http.url.rpartition(":")[2])
        http.stop()
        listen("127.0.0.1", port).close()


@contextlib.contextmanager
def http_process(folder, listener, before=None, stderr=None, **settings):
    """The HTTP process over the engine and the tokenizer in a folder; `before` runs in it before Python does."""
    number = listener.fileno()
    told = HttpSettings(
        endpoint=f"ipc://{folder}/engine",
        model=str(folder),
        model_name="m",
        listener=number,
        parent=os.getpid(),
        **settings,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "ckdist.serve"],
        stdin=subprocess.PIPE,
        stderr=stderr,
        pass_fds=(number,),
        env=environment(),
        preexec_fn=before,  # noqa: PLW1509
    )
    try:
        process.stdin.write(told.to_json())
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def test_silent_clients_are_let_go(tmp_path):
    """Those that never say a word, and those that never end a head; not one that asks now and then."""
    silence = 2.0
    write_tokenizer(tmp_path)
    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB), listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        client = httpx.Client(base_url=f"http://127.0.0.1:{address[1]}")
        with http_process(tmp_path, listener, silence=silence, first_request=silence), client:
            wait_for(lambda: client.get("/health").status_code == 200)
            silent = [socket.create_connection(address) for _ in range(20)]
            for one in silent[10:]:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
            asking, begun = socket.create_connection(address), time.monotonic()
            while time.monotonic() - begun < 1.5 * silence:
                asking.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    answer += (part := asking.recv(4096))
                    assert part, "it was let go"
                time.sleep(0.2)
            for one in silent:
                one.settimeout(20)
                assert one.recv(1) == b""
            for one in (*silent, asking):
                one.close()


def ask(url, path="/v1/completions", **more):
    return httpx.post(url + path, json={"prompt": "ab", "max_tokens": 2}, **more)


@contextlib.contextmanager
def silent_connections(url, count):
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as held:
        yield [held.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(count)]


def test_silent_connections_do_not_keep_others_out():
    with serving(api_key="key") as (_, http), silent_connections(http.url, 900):
        assert status(http) == 200
        assert ask(http.url, headers={"Authorization": "Bearer key"}).status_code == 200


def test_connections_stay_within_the_limit_of_open_files(tmp_path):
    """More silent clients than files: each new one takes the place of the oldest, and a request under way keeps its
    own.
    """
    write_tokenizer(tmp_path)
    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB) as engine, listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
        with http_process(tmp_path, listener, few):
            wait_for(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200, 30)
            engine.delay = 0.02
            running = in_background(
                lambda: httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 100}, timeout=20)
            )
            wait_for(lambda: engine.running)
            with silent_connections(url, 400) as silent:
                assert ask(url, timeout=30).status_code == 200
                assert silent[0].recv(1) == b"", "the oldest makes room"
                wait_for(lambda: running)
                assert running[0].status_code == 200


def test_too_few_open_files_are_refused_or_said_once_a_minute(tmp_path):
    write_tokenizer(tmp_path)
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); from ckdist.cli.main import main; "
        "raise SystemExit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "64 files may be open, and the server needs 128" in done.stderr
    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB), listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with http_process(tmp_path, listener, stderr=(tmp_path / "log").open("w"), no_log_requests=True) as process:
            wait_for(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200, 30)
            used = len(os.listdir(f"/proc/{process.pid}/fd"))
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 5, used + 5))  # after its places were counted
            with silent_connections(url, 20):
                time.sleep(2.5)
            assert ask(url, timeout=30).status_code == 200
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1 and "no connections are accepted for a second: Too many open files" in lines[0]


def test_a_client_that_reads_slowly_gets_all_of_a_large_answer():
    """What it has not read waits in the server, which answers others meanwhile."""
    body = json.dumps({"content": "ab" * 100_000, "with_pieces": True}).encode()
    with serving() as (_, http), socket.socket() as slow:
        host, port = http.url.removeprefix("http://").split(":")
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect((host, int(port)))
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        slow.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = slow.recv(1000)  # it has begun
        assert answer.startswith(b"HTTP/1.1 200 ") and ask(http.url, timeout=30).status_code == 200
        answer += b"".join(iter(lambda: slow.recv(1 << 20), b""))
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"]) == 200_000


def test_a_burst_is_answered_in_json():
    async def one(address, body):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nConnection: "
            b"close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head, _, text = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), head.lower(), json.loads(text)

    async def burst(address):
        body = json.dumps({"prompt": "ab", "max_tokens": 20}).encode()
        return await asyncio.gather(*(one(address, body) for _ in range(700)))

    with serving(api_key="key", max_queue=0) as (_, http):
        answers = asyncio.run(burst(http.url.removeprefix("http://").split(":")))
    refused = [(head, body) for code, head, body in answers if code == 429]
    assert refused and {code for code, *_ in answers} == {200, 429}
    assert all(b"retry-after: " in head and body["error"]["type"] == "rate_limit_error" for head, body in refused)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_http_process_is_started_again(number, monkeypatch):
    monkeypatch.setattr(heartbeat, "STUCK_SECONDS", 5.0)
    with serving() as (engine, http):
        engine.delay = 0.02
        pid, running = http.pid, in_background(lambda: stream_text(http, 200))
        wait_for(lambda: engine.running == 1)
        os.kill(pid, number)
        wait_for(lambda: running, 30)
        assert isinstance(running[0], (openai.APIError, httpx.TransportError)), running[0]
        assert ask(http.url, timeout=60).status_code in (200, 503)  # it waits in the listening socket's queue
        wait_for(lambda: status(http) == 200, 30)
        assert http.pid != pid and not _alive(pid) and http.poll() is None
        assert ask(http.url).status_code == 200


def test_an_http_process_that_dies_again_and_again_ends_the_job():
    with serving() as (_, http):
        for _ in range(4):
            pid = http.pid
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: http.pid != pid or http.poll() is not None)
        wait_for(lambda: http.poll() == -signal.SIGKILL)


def test_the_end_of_an_http_process_is_given_with_its_reason(tmp_path, monkeypatch, capfd):
    """Its last line is part of the error, and all its lines arrive on standard error."""
    (tmp_path / "tokenizer.json").write_text("{}")
    http = HttpProcess.start(
        ServeConfig(port=0), f"ipc://{tmp_path}/engine", str(tmp_path), "m", listen("127.0.0.1", 0)
    )
    wait_for(lambda: http.poll() is not None, 30)
    failure = http.failure()
    http.stop()
    assert "the HTTP process ended with code 1: " in str(failure) and "the tokenizer does not load" in str(failure)
    assert "the tokenizer does not load" in capfd.readouterr().err


def test_an_http_process_that_cannot_be_started_again_ends_the_job(monkeypatch, caplog):
    """What starts in its place ends before it has read its settings, which are more than a pipe holds."""
    with serving() as (_, http):
        http._settings = dataclasses.replace(http._settings, model="m" * (1 << 20))
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        os.kill(http.pid, signal.SIGKILL)
        wait_for(lambda: http.poll() == -signal.SIGKILL)
    assert "cannot be restarted: the HTTP process ended at its start: Broken pipe" in caplog.text
    assert "was ended by signal 9" in str(http.failure())


def test_an_http_process_that_is_started_again_during_a_drain_ends(monkeypatch):
    with serving() as (_, http):
        spawn = http._spawn

        def meanwhile():
            made = spawn()
            http._ending = True  # as `drain` sets it, which found no process that it could tell
            return made

        http._spawn = meanwhile
        os.kill(http.pid, signal.SIGKILL)
        wait_for(lambda: http.poll() == 0, 30)


def test_a_websocket_is_a_request_like_others():
    """There are none: who asks for one without a key is refused as everywhere, and with a key there is no such path."""
    with serving(api_key="key") as (_, http):
        host, port = http.url.removeprefix("http://").split(":")
        head = f"GET /v1/realtime HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
        for key, answer in (("", 401), ("Authorization: Bearer key\r\n", 404)):
            with socket.create_connection((host, int(port)), 10) as one:
                one.sendall(f"{head}{key}\r\n".encode())
                assert one.recv(4096).startswith(b"HTTP/1.1 %d " % answer)


def test_settings_survive_the_way():
    settings = HttpSettings(
        endpoint="ipc://x", model="m", model_name="n", listener=3, parent=4, api_keys=(ApiKey("a", "secret"),)
    )
    assert HttpSettings.from_json(settings.to_json()) == settings
    assert "secret" not in repr(settings)


def test_messages_that_make_no_sense_are_ignored(tmp_path, caplog):
    """One log line each; what runs goes on, and what ended stays ended."""

    async def scenario(engine):
        client = EngineClient(engine.endpoint)
        client.start()
        try:
            while client.state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with client.generation() as generation:
                generation.submit(0, Submit(new_id(), pack_tokens([5, 6]), SamplingParams(max_tokens=3)))
                (sequence,) = generation._ids
                engine.said += (
                    {"op": "fly"},
                    {"op": "status", "state": "asleep"},
                    {"op": "tokens", "id": sequence, "tokens": 7, "finish_reason": None},
                    {"op": "tokens", "id": sequence, "tokens": [7], "finish_reason": "boredom"},
                    {"op": "tokens", "id": "of nobody", "tokens": [7], "finish_reason": None},
                    {"op": "error", "id": "of nobody", "message": "?"},
                )
                found = []
                while generation.running:
                    found += [token for _, message in await generation.next() for token in message.tokens]
            assert found == [5, 6, 5] and client.state == "ready"
        finally:
            client.close()

    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB) as engine:
        engine.delay = 0.05
        asyncio.run(asyncio.wait_for(scenario(engine), 30))
    ignored = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert len(ignored) == 4 and "Invalid value 'fly'" in ignored[0] and "state must be a string matching" in ignored[1]


def test_a_body_that_is_too_slow_is_408(monkeypatch):
    class Slow:
        async def stream(self):
            yield b"{"
            await asyncio.sleep(10)

    monkeypatch.setattr(body, "READ_SECONDS", 0.05)
    with pytest.raises(Problem, match="the body did not arrive within") as problem:
        asyncio.run(body.read_body(Slow(), 100))
    assert problem.value.status == 408


@pytest.mark.parametrize(
    "error, status, text",
    [
        (RequestError("n is 0", "n"), 400, "n is 0"),
        (ConfigError("no such model"), 400, "no such model"),
        (EngineError("rank 1 died"), 500, "rank 1 died"),
        (KeyError("a secret"), 500, "internal error; the server's log has the details"),
    ],
)
def test_what_an_error_is_to_a_client(error, status, text):
    problem = Problem.of(error)
    assert (problem.status, str(problem)) == (status, text) and Problem.of(problem) is problem


def test_a_process_that_hears_nothing_is_killed_in_its_time():
    with serving() as (_, http):
        os.kill(http.pid, signal.SIGSTOP)
        begun = time.monotonic()
        assert http.stop(0.5) == -signal.SIGKILL and time.monotonic() - begun < 20
        assert not _alive(http.pid)
