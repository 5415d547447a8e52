"""Rank 0's loop over a real socket: answers, refusals, floods, drains, lost ranks, and silence while idle."""

import os
import socket
import tempfile
import threading
import time

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgpack import packb as encode

from ckdist.engine import coordinator
from ckdist.engine.coordinator import HTTP_ROUTING_ID, Coordinator
from ckdist.engine.engine import Engine
from ckdist.engine.messages import FROM_RANK_0, PromptScores, read
from ckdist.engine.messages import pack_tokens as ids
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.socket_directory import socket_directory
from ckdist.errors import CommError, ConfigError, EngineError, NativeError
from tests.support.fake_engine import plain
from tests.support.paged_executable import PagedExecutable, PlainSampler, alone

GREEDY = {"max_tokens": 6, "temperature": 0.0}


def decode(data):
    return plain(read(data, FROM_RANK_0))


class SlowExecutable(PagedExecutable):
    seconds = 0.0

    def run(self, batch):
        time.sleep(self.seconds)
        return super().run(batch)


class Ranks:
    """What RankReports is to a coordinator: counts how often the ranks are asked."""

    asked = 0

    def refresh(self):
        self.asked += 1

    def rows(self):
        return [{"rank": 0, "steps_total": self.asked}]


class Server:
    """A coordinator that runs in a thread, and a client of it."""

    def __init__(self, directory, **options):
        os.chmod(directory, 0o700)
        self.coordinator = Coordinator(str(directory), {"name": "simulated"}, **options)
        self.executable = SlowExecutable()
        self.engine = Engine(self.executable, PlainSampler(), max_waiting=4)
        self.context = zmq.Context()
        self.socket = self.connect(HTTP_ROUTING_ID)
        self.raised = None
        self.lost = None
        self.ranks = Ranks()
        self.thread = threading.Thread(target=self.run)

    def connect(self, name=None):
        socket = self.context.socket(zmq.DEALER)
        if name is not None:
            socket.setsockopt(zmq.ROUTING_ID, name)
        socket.connect(self.coordinator.address)
        return socket

    def run(self):
        try:
            self.coordinator.begin(self.engine, self.ranks)
            self.coordinator.run(self.check_peers)
        except EngineError as error:
            self.raised = error

    def check_peers(self):
        if self.lost is not None:
            raise self.lost

    def send(self, socket=None, **message):
        (socket or self.socket).send(encode(message))

    def submit(self, id, prompt, **sampling):
        self.send(op="submit", id=id, prompt=ids(prompt), sampling={**GREEDY, **sampling})

    def receive(self, want, socket=None, seconds=5.0):
        """The next message for which `want(message)` holds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and (socket or self.socket).poll(1000 * left):
            message = decode((socket or self.socket).recv())
            if want(message):
                return message
        raise AssertionError("no such message came in time")

    def of(self, id):
        return self.receive(lambda m: m["op"] != "status" and m["id"] == id)

    def tokens(self, id):
        """All tokens of a request and its last message."""
        tokens = []
        while True:
            message = self.of(id)
            assert message["op"] == "tokens", message
            tokens += message["tokens"]
            if message["finish_reason"] is not None:
                return tokens, message

    def state(self, state):
        return self.receive(lambda m: m["op"] == "status" and m["state"] == state)

    def stats(self):
        while self.socket.poll(0):
            self.socket.recv()
        return self.receive(lambda m: m["op"] == "status")["stats"]

    def close(self):
        self.coordinator.request_drain()
        if self.thread.ident is not None:
            self.thread.join(10)
            assert not self.thread.is_alive()
        self.coordinator.close()
        self.context.destroy(linger=0)


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    server.thread.start()
    server.state("ready")
    yield server
    server.close()


def test_a_request_and_its_answer(server):
    server.submit("r", [1, 2, 3], logprobs=1, prompt_logprobs=0)
    first = server.of("r")
    assert first["prompt_tokens"] == 3 and first["cached_tokens"] == 0 and first["finish_reason"] is None
    assert len(PromptScores(**first["prompt_logprobs"])) == 3 and len(first["logprobs"]) == len(first["tokens"]) == 1
    tokens, last = server.tokens("r")
    assert first["tokens"] + tokens == alone([1, 2, 3], SamplingParams(**GREEDY)) and last["finish_reason"] == "length"
    stats = server.stats()
    assert stats["requests_total"] == 1 and stats["generated_tokens_total"] == 6 and stats["step_seconds_count"] == 6
    assert all(type(value) in (int, float) for value in stats.values())


def test_requests_that_come_together_begin_in_one_step(server):
    group = [{"op": "submit", "id": str(i), "prompt": ids([i, 3]), "sampling": GREEDY} for i in range(4)]
    server.socket.send_multipart([encode(message) for message in group])
    assert server.tokens("3")[0] == alone([3, 3], SamplingParams(**GREEDY))
    assert server.stats()["step_seconds_count"] == 6


def test_two_clients_with_the_same_ids(server):
    other = server.connect()
    server.send(other, op="submit", id="r", prompt=ids([4]), sampling=GREEDY)
    server.submit("r", [5])
    assert server.tokens("r")[0] == alone([5], SamplingParams(**GREEDY))
    assert server.receive(lambda m: m["op"] == "tokens", other)["tokens"] == alone([4], SamplingParams(**GREEDY))[:1]


def test_a_process_that_was_started_again_ends_what_its_name_asked_for(server):
    server.executable.seconds = 0.01
    server.submit("old", [5], max_tokens=100, ignore_eos=True)
    server.of("old")
    again = server.connect(HTTP_ROUTING_ID)
    server.send(again, op="hello")
    server.send(again, op="submit", id="new", prompt=ids([4]), sampling=GREEDY)
    while server.receive(lambda m: m["op"] == "tokens" and m["id"] == "new", again)["finish_reason"] is None:
        pass
    status = server.receive(lambda m: m["op"] == "status", again)
    assert status["stats"]["requests_running"] == 0, status


def test_folders_of_killed_servers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {name: tmp_path / f"ckdist-{name}" for name in ("dead", "live", "full", "empty", "file")}
    for folder in folders.values():
        folder.mkdir(0o700)
    sockets = {name: socket.socket(socket.AF_UNIX) for name in ("dead", "live", "full")}
    for name, bound in sockets.items():
        bound.bind(str(folders[name] / "engine"))
    sockets["live"].listen()
    (folders["full"] / "notes").touch()
    (folders["file"] / "engine").touch()
    for name in ("dead", "full"):
        sockets[name].close()
    with socket_directory() as own:
        assert os.stat(own).st_mode & 0o777 == 0o700
        assert {name for name, folder in folders.items() if folder.exists()} == {"live", "full", "empty", "file"}
        with socket.socket(socket.AF_UNIX) as engine:
            engine.bind(f"{own}/engine")
        with socket_directory():  # another server starts while this one's engine starts again
            assert os.path.exists(own)
    assert not os.path.exists(own)
    sockets["live"].close()


BAD_MESSAGES = [  # data, part of the error, its field
    (b"\xc1", "message is not valid", None),
    (encode({"op": "sing"}), "op is not valid: Invalid value 'sing'", "op"),
    (encode({"op": 3}), "op must be a string", "op"),
    (b"\x91" * 100_000, "message is not valid", None),
    (encode({"op": "submit", "prompt": ids([1])}), "id is not valid: Object missing", "id"),
    (encode({"op": "submit", "id": "x" * 201, "prompt": ids([1])}), "id must be a string", "id"),
    (encode({"op": "submit", "id": "r", "prompt": "text"}), "prompt must be bytes, got `str`", "prompt"),
    (encode({"op": "submit", "id": "r", "prompt": ids([1] * 600)}), "prompt of 600 tokens does not fit", "prompt"),
    (
        encode({"op": "submit", "id": "r", "prompt": ids([1]), "sampling": {"beams": 4}}),
        "unknown sampling field 'beams'",
        "sampling",
    ),
    (encode({"op": "submit", "id": "r", "prompt": ids([1]), "sampling": {1: 4}}), "sampling must be", "sampling"),
    (
        encode({"op": "submit", "id": "r", "prompt": ids([1]), "sampling": {"top_p": None}}),
        "top_p must be a number",
        "top_p",
    ),
    (
        encode({"op": "submit", "id": "r", "prompt": ids([1]), "sampling": {"stop_token_ids": [[]]}}),
        "stop_token_ids[0] must be an integer",
        "stop_token_ids",
    ),
    (encode({"op": "abort"}), "id is not valid", "id"),
]


def test_bad_messages_get_an_error(server):
    for data, part, field in BAD_MESSAGES:
        server.socket.send(data)
        error = server.receive(lambda m: m["op"] == "error")
        assert part in error["message"] and "\n" not in error["message"]
        assert (error["field"], error["status"]) == (field, 400)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 9)), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(list(SamplingParams.__dataclass_fields__))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.one_of(
        st.binary(max_size=40).map(lambda data: [data]),
        st.lists(st.binary(max_size=3), max_size=3),
        st.fixed_dictionaries(
            {"op": st.sampled_from(["submit", "abort"])}, optional={"id": values, "prompt": values, "sampling": values}
        ).map(lambda m: [encode(m)]),
        st.dictionaries(names, values, max_size=3).map(
            lambda s: [encode({"op": "submit", "id": "f", "prompt": ids([1]), "sampling": s})]
        ),
    )
)
def test_no_message_stops_the_loop(server, frames):
    if frames:
        server.socket.send_multipart(frames)
    server.send(op="answer me")
    error = server.receive(lambda m: m["op"] == "error" and (m["status"] == 500 or "answer me" in m["message"]))
    assert error["status"] == 400


def test_a_vanished_client_frees_its_slots(server):
    server.executable.seconds = 0.01
    server.submit("r", [1], max_tokens=500)
    server.of("r")
    server.send(op="abort", id="r")
    assert server.tokens("r")[1]["finish_reason"] == "abort"
    other = server.connect()
    server.send(other, op="submit", id="r", prompt=ids([4]), sampling={**GREEDY, "max_tokens": 500})
    server.receive(lambda m: m["op"] == "tokens", other)
    other.close(linger=0)
    end = time.monotonic() + 3
    while server.stats()["requests_running"]:
        assert time.monotonic() < end
    assert server.stats()["blocks_used"] == 0


def test_more_clients_than_there_are_places_for_are_refused(server, monkeypatch):
    monkeypatch.setattr(coordinator, "MAX_PEERS", 1)
    first, second = server.connect(), server.connect()
    for one, refused in ((first, False), (second, True)):
        server.send(one, op="submit", id="r", prompt=ids([4]), sampling=GREEDY)
        message = server.receive(lambda m: m["op"] in ("tokens", "error"), one)
        assert (message["op"] == "error") == refused
    assert message["status"] == 400 and message["message"].startswith("1 clients are connected")


def test_a_full_queue_is_429(server):
    server.executable.seconds = 0.2
    for i in range(14):  # 8 run, 4 wait
        server.submit(str(i), [i], max_tokens=2)
    error = server.receive(lambda m: m["op"] == "error")
    assert error["status"] == 429 and "of at most 4" in error["message"]


def test_loading_answers_and_a_long_step_that_packs_weights_beats(tmp_path):
    server = Server(tmp_path, step_limit=0.2)
    server.engine._more_stats = lambda: {"weights_packed_bytes": time.monotonic()}
    server.state("loading")
    server.submit("early", [1])
    error = server.of("early")
    assert error["status"] == 503 and "loading" in error["message"]
    server.executable.seconds = 1.6
    server.thread.start()
    assert server.state("ready")["model"] == {"name": "simulated", "vocab_size": 50, "context_length": 512}
    server.submit("r", [1], max_tokens=1)
    beats = 0
    while (message := server.receive(lambda m: True))["op"] == "status":
        beats += message["stats"]["requests_running"]
    assert message["op"] == "tokens" and beats >= 2
    server.close()


def test_a_drain_finishes_what_runs_and_takes_nothing_new(server):
    server.executable.seconds = 0.02
    server.submit("r", [1], max_tokens=30)
    server.of("r")
    server.send(op="drain")
    server.submit("late", [1])
    error = server.receive(lambda m: m["op"] == "error")
    assert error["id"] == "late" and error["status"] == 503
    assert server.tokens("r")[1]["finish_reason"] == "length"
    server.thread.join(5)
    assert not server.thread.is_alive() and server.raised is None and server.coordinator.state == "draining"


def test_a_drain_does_not_wait_for_ever(tmp_path):
    server = Server(tmp_path, drain_seconds=0.2)
    server.executable.seconds = 0.02
    server.thread.start()
    server.state("ready")
    server.submit("r", [1], max_tokens=500)
    server.of("r")
    server.coordinator.request_drain()
    assert server.receive(lambda m: m["op"] == "error")["status"] == 503
    server.thread.join(5)
    assert not server.thread.is_alive()
    server.close()


@pytest.mark.parametrize(
    "error, status", [(CommError("rank 1 was lost in step 7"), 503), (ZeroDivisionError("division"), 500)]
)
def test_a_broken_engine_tells_everyone_and_ends(server, error, status):
    server.executable.seconds = 0.02
    server.submit("a", [1], max_tokens=500)
    server.of("a")
    server.executable.failure = error
    told = server.receive(lambda m: m["op"] == "error")
    assert (told["id"], told["status"]) == ("a", status) and str(error) in told["message"]
    assert str(error) in server.state("failed")["error"]
    server.thread.join(5)
    assert not server.thread.is_alive() and str(error) in str(server.raised)


def test_a_rank_lost_while_idle_is_noticed(server):
    server.lost = CommError("rank 1 was lost")
    assert "rank 1 was lost" in server.state("failed")["error"]


def test_ranks_are_asked_only_while_somebody_looks(server, monkeypatch):
    monkeypatch.setattr(coordinator, "WATCH_SECONDS", 1.2)
    assert server.receive(lambda m: m["op"] == "status")["ranks"] == [] and server.ranks.asked == 0
    for times in (1, 2):  # a second look, since on a busy machine the first may bring one answer alone
        server.send(op="watch")
        server.receive(lambda m, n=times: m["op"] == "status" and m["ranks"] and m["ranks"][0]["steps_total"] >= n)
    looked = server.ranks.asked
    last = server.receive(lambda m: m["op"] == "status" and not m["ranks"])
    asked = server.ranks.asked
    later = server.receive(lambda m: m["op"] == "status" and m["clock"] > last["clock"] + 0.9)
    assert later["ranks"] == [] and server.ranks.asked == asked <= looked + 2


def test_sleeps_while_idle(server):
    time.sleep(0.2)
    begin = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - begin < 0.1


def test_the_directory_is_private_and_short(tmp_path):
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="mode 700, not 755"):
        Coordinator(str(tmp_path), {})
    with pytest.raises(ConfigError, match="of at most 107; use a shorter"):
        Coordinator(str(tmp_path / ("x" * 100)), {})
    with pytest.raises(ConfigError, match="No such file"):
        Coordinator(str(tmp_path / "absent"), {})


def test_a_mistake_of_ours_in_one_message_is_a_500_and_ends_nothing_else(server, monkeypatch, caplog):
    def broken(*_, **__):
        raise KeyError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "add", broken)
        server.submit("a", [1, 2])
        told = server.of("a")
    assert (told["op"], told["status"]) == ("error", 500) and "KeyError; this is a bug" in told["message"]
    assert "a message could not be handled" in caplog.text and server.state("ready")
    server.submit("b", [1, 2])
    assert server.tokens("b")[0] == alone([1, 2], SamplingParams(**GREEDY))


def test_a_sequence_that_fails_is_told_to_its_client_alone(server, monkeypatch):
    def fails(*_):
        raise NativeError("no memory for the scores")

    monkeypatch.setattr(server.engine.outputs.sampler, "logprobs", fails)
    server.submit("scored", [1, 2, 3], prompt_logprobs=0)
    told = server.of("scored")
    assert (told["op"], told["status"], told["message"]) == ("error", 500, "no memory for the scores")
    server.submit("other", [4])
    assert server.tokens("other")[0] == alone([4], SamplingParams(**GREEDY))
