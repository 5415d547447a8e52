"""The main job as a user runs it: `mpirun -n 2 ckdist serve` on the bundled model, real clients, real faults."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support import launcher
from tests.support.clients import openai
from tests.support.launched import wait_ended
from tests.support.launcher import environment, mpirun, one_host, run_ranks
from tests.support.paths import ROOT
from tests.support.served import wait_healthy

COMMAND = [sys.executable, "-m", "ckdist.cli.main", "serve"]
JOB, RANK = "CKDIST_TEST_JOB", "OMPI_COMM_WORLD_RANK"  # variables of a rank
MEASURED = ("--prefill", "auto")  # a job of a test measures no prefill by default
PROMPTS = [
    "def main(",
    "import os\n",
    "class Node:\n    ",
    "for i in range(",
    "# The",
    "try:\n",
    "return ",
    "if __name__",
]


class Server:
    """A running job. `ranks` are the processes of the ranks, rank 0 first.

    `cold`: the ranks are children of mpirun, not forks (tests/support/stubs.py).
    """

    def __init__(self, ranks: int, *flags: str, wrapper: tuple[str, ...] = (), cold: bool = False):
        words = [*COMMAND, "--port", "0", "-t", "1", "--comm-timeout", "5", *flags]
        job = str(time.monotonic_ns())
        self.process = subprocess.Popen(
            [*wrapper, *mpirun(ranks)[:-1], *(() if cold else launcher.STUB), *words],
            env={**one_host(), JOB: job},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"serving .* at (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("the server ended:\n" + "".join(self.lines))
        self.reader = concurrent.futures.ThreadPoolExecutor(1)
        self.rest = self.reader.submit(self.process.stdout.read)
        wait_healthy(self.url)
        found = dict(ranks_of(job))
        self.ranks = [found[rank] for rank in range(ranks)]

    @property
    def http(self) -> psutil.Process:
        """Rank 0's HTTP process."""
        (found,) = [process for process in self.ranks[0].children() if "ckdist.serve" in process.cmdline()]
        return found

    def output(self) -> str:
        return "".join(self.lines) + self.rest.result(timeout=30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.ranks[0].send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()


def ranks_of(job: str) -> Iterator[tuple[int, psutil.Process]]:
    """The ranks of a job with their processes."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            variables = process.environ()
            if process.cmdline()[: len(COMMAND)] == COMMAND and variables.get(JOB) == job and RANK in variables:
                yield int(variables[RANK]), process


@contextlib.contextmanager
def serving(ranks: int, *flags: str, **more):
    server = Server(ranks, *flags, **more)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server():
    with serving(2, *MEASURED) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def test_a_salt_finds_its_own_prompts_alone(server):
    """A prompt of 80 tokens, whole blocks of which are found again by the salt that left them."""

    def cached(**fields):
        body = {"prompt": [5, 6, 7, 8] * 20, "max_tokens": 1, **fields}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    salted = [cached(cache_salt=salt) for salt in "abab"]
    assert salted == [0, 0, 64, 64] and cached() == 0 and cached() == 64
    assert cached(cache_prompt=False) == 0 and cached(cache_salt="a", cache_prompt=False) == 0


def complete(client, prompt: str, **more) -> str:
    return client.completions.create(model="any", prompt=prompt, max_tokens=24, temperature=0, **more).choices[0].text


def test_streaming_equals_not_streaming(client):
    whole = client.completions.create(model="any", prompt=PROMPTS[0], max_tokens=24, temperature=0)
    chunks = list(
        client.completions.create(
            model="any",
            prompt=PROMPTS[0],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text != ""
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_chat(client):
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = client.chat.completions.create(model="any", messages=messages, max_completion_tokens=16, temperature=0)
    chunks = client.chat.completions.create(
        model="any", messages=messages, max_completion_tokens=16, temperature=0, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")


def test_the_machine_tells_what_every_rank_did(server, client):
    """A completion of 24 tokens is 23 steps without prompts, each of which reads the rank's weights once."""
    with httpx.stream("GET", server.url + "/v1/machine", timeout=20) as answer:
        events = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)
        before = next(e["ranks"] for e in events if e["ranks"] and "steps_total" in e["ranks"][0])
        complete(client, "A prompt of no other test's.", extra_body={"ignore_eos": True})
        wanted = before[0]["decode_steps_total"] + 23
        after = next(e["ranks"] for e in events if e["ranks"][0]["decode_steps_total"] >= wanted)
    assert [rank["rank"] for rank in after] == [0, 1] and len({rank["steps_total"] for rank in after}) == 1
    for old, new in zip(before, after, strict=True):
        since = {name: new[name] - old[name] for name in new if name.endswith("_total")}
        assert since["decode_steps_total"] == 23
        assert 0 < since["wait_seconds_total"] + since["exchange_seconds_total"] < since["step_seconds_total"]
        assert 0 < since["decode_seconds_total"] <= since["step_seconds_total"]
        read = since["decode_read_bytes_total"] / 23
        assert 0.5 * new["weights_bytes"] < read < new["weights_bytes"] + new["cache_bytes"]
        assert new["bandwidth"] is None or new["bandwidth"] > 1e8


def test_eight_clients_get_what_they_would_get_alone(client):
    alone = [complete(client, p) for p in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda p: complete(client, p), PROMPTS))
    assert together == alone


def test_the_same_seed_gives_the_same_text(client):
    draw = lambda seed: (
        client.completions.create(model="any", prompt="def ", max_tokens=24, temperature=1.0, seed=seed).choices[0].text
    )
    assert draw(7) == draw(7) != draw(8)


def test_a_prompt_is_computed_once(client):
    prompt = "import os\nimport sys\n" * 8
    client.completions.create(model="any", prompt=prompt, max_tokens=1)
    again = client.completions.create(model="any", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 16


def test_echoed_log_probabilities_sum_like_a_scorer_needs(client):
    answer = client.completions.create(model="any", prompt="import os\n", max_tokens=0, echo=True, logprobs=1)
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores[0] is None and all(s <= 0 for s in scores[1:]) and answer.choices[0].text == "import os\n"


def test_a_prompt_longer_than_the_context_is_refused(client):
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens"):
        client.completions.create(model="any", prompt=[5] * 2000, max_tokens=1)


def test_idle_threads_sleep(server, client):
    complete(client, PROMPTS[0])
    time.sleep(0.5)
    before = [sum(p.cpu_times()[:2]) for p in server.ranks]
    time.sleep(2)
    spent = [sum(p.cpu_times()[:2]) - b for p, b in zip(server.ranks, before, strict=True)]
    assert max(spent) < 0.15, f"{spent} s of CPU in 2 s of idleness"


def test_the_start_is_four_lines(server):
    assert len(server.lines) == 4, server.lines
    model, memory, kernels, url = server.lines
    assert re.fullmatch(
        r"ckdist-bundled: llama, 11\.0 M parameters, BF16; 2 ranks × 1 thread on 1 host \(shared memory\)\n", model
    )
    assert re.fullmatch(
        r"memory per rank: [\d.]+ MiB of weights and [\d.]+ [GM]iB of i16 cache for \d+ tokens "
        r"\([\d.]+ MiB for a sequence of 1024\), of [\d.]+ [GM]iB free\n",
        memory,
    )
    assert re.fullmatch(
        r"(AMX|AVX-512|AVX2)( \(VNNI(, BF16)?\))? kernels; prefill: t\w+-parallel .*\(measured( before)?: \d+ % .*\)\n",
        kernels,
    )
    assert re.fullmatch(rf"serving ckdist-bundled at {server.url}  try: curl {server.url}/v1/.*\n", url)
    assert re.search(
        r'ckdist_prefill_choice_info{reason="t\w+-parallel .*measured', httpx.get(server.url + "/metrics").text
    )


def test_other_commands_say_nothing_but_their_result(tmp_path):
    """`bench` says what prefill does, then the names of columns and two rows."""
    model = ["-m", "tests/golden/llama3", "-t", "1"]
    for words, lines in (
        (["perplexity", "--token-ids", "3,4,5"], 1),
        (["bench", "-p", "8", "-n", "2", "-r", "1", *MEASURED], 4),
    ):
        done = run_ranks(2, "-m", "ckdist.cli.main", *words, *model, timeout=60, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", lines), done.stdout + done.stderr


def test_each_rank_holds_its_half():
    """The placement map: the shards are within a tenth of each other and add up to the model.

    It and all numbers of the choice are told with -v.
    """
    with serving(2, "-v", *MEASURED) as verbose:
        verbose.close()
        lines = verbose.output().splitlines()
    rows = [re.findall(r"([\d.]+) MiB", line) for line in lines if re.match(r"[01] +\S+ +\d", line)]
    assert any(line.startswith("layouts TENSOR and TOKEN over 2 ranks; 1 thread") for line in lines)
    assert any(re.match(r"prefill: .*-parallel .*\(measured.*: \d+ % (faster|slower)", line) for line in lines)
    weights = [float(row[0]) for row in rows]
    assert len(weights) == 2 and max(weights) < 1.1 * min(weights) and sum(weights) < 23


def test_a_client_that_goes_away_frees_its_slot(server, client):
    stream = client.completions.create(
        model="any", prompt="x", max_tokens=900, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while "ckdist_requests_running 0.0" not in httpx.get(server.url + "/metrics").text:
        assert time.monotonic() < deadline, httpx.get(server.url + "/metrics").text
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs(number):
    """launch/drained gets it, and sends SIGUSR1 to mpirun. Rank 0 gets one in the test of stages."""
    with serving(2, wrapper=("launch/drained",)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        stream = client.completions.create(
            model="any", prompt="x", max_tokens=100, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)
        server.process.send_signal(number)
        last = [c for c in pieces if c.choices][-1]
        assert last.choices[0].finish_reason == "length"
        assert server.process.wait(60) == 0
        assert "To stop without cutting streams" not in server.output()


def test_ranks_of_one_host_listen_on_loopback_alone(server):
    addresses = {
        c.laddr.ip
        for rank in server.ranks
        for p in (rank, *rank.children())
        for c in p.net_connections()
        if c.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_a_killed_http_process_is_started_again(server, client):
    stream = iter(
        client.completions.create(
            model="any", prompt="x", max_tokens=900, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
    )
    next(stream)
    server.http.kill()
    with pytest.raises((openai.APIError, httpx.TransportError)):
        for _ in stream:
            pass
    wait_healthy(server.url)
    assert len(complete(client, PROMPTS[0])) > 0
    deadline = time.monotonic() + 5
    while "ckdist_requests_running 0.0" not in (text := httpx.get(server.url + "/metrics").text):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_ranks_end_with_a_killed_mpirun():
    with serving(2, cold=True) as server:
        server.process.kill()
        assert wait_ended(server.ranks, 20) == []


@pytest.mark.parametrize(
    "kill, flags",
    [(signal.SIGSTOP, ()), (signal.SIGKILL, ("-pp", "3", "--comm-timeout", "4"))],
    ids=["tensors", "stages"],
)
def test_a_lost_rank_ends_the_job_by_name(kill, flags):
    with serving(3, *flags) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)
        stream = iter(
            client.completions.create(
                model="any", prompt="x", max_tokens=900, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(stream)
        start = time.monotonic()
        server.ranks[2].send_signal(kill)
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            for _ in stream:
                pass
        code = server.process.wait(20)
        assert time.monotonic() - start < 15 and code != 0
        assert "rank 2" in server.output()
        assert wait_ended(server.ranks, 10) == []


def test_stages_serve_many_at_once_and_drain():
    """Texts are those that each prompt gets alone, while one client leaves; a stream that runs is finished before the
    job ends.
    """
    with serving(2, "-pp", "2") as server:
        own = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        expected = [complete(own, prompt) for prompt in PROMPTS]
        ask = {"model": "any", "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
        leaving = own.completions.create(prompt="x", max_tokens=900, **ask)
        next(iter(leaving))
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            texts = pool.map(lambda prompt: complete(own, prompt), PROMPTS)
            leaving.close()
            assert list(texts) == expected
        stream = iter(own.completions.create(prompt="x", max_tokens=60, **ask))
        next(stream)
        server.ranks[0].send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.process.wait(30) == 0, server.output()
        assert f"To stop without cutting streams: kill -TERM {server.ranks[0].pid}\n" in server.output()


def test_a_port_in_use_is_one_line_and_code_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*mpirun(2), "-m", "ckdist.cli.main", "serve", "--port", str(port)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ckdist:")]
    assert done.returncode == 2 and len(lines) == 1 and str(port) in lines[0], done.stderr


def test_nothing_is_left_behind():
    assert not [name for name in os.listdir("/dev/shm") if "ckdist" in name]
