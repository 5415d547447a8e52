"""Fairness on the HTTP side: places and limits of a client, the place in the queue, and streams that nobody reads."""

import asyncio
import itertools
import time

import httpx
import pytest
from msgspec import structs

from ckdist.config.serve_config import ServeConfig
from ckdist.engine.messages import Submit
from ckdist.engine.queue_place import ANY_PLACE, QueuePlace
from ckdist.errors import ConfigError
from ckdist.serve import answer
from ckdist.serve.accounts import MAX_ADDRESSES, Account, Accounts, HeldMessage, part_of
from ckdist.serve.answer import ANTHROPIC_PING, KEEP_ALIVE, EventStream
from ckdist.serve.api_keys import ApiKey, KeyLimits
from ckdist.serve.problems import Problem
from ckdist.serve.text_work import Lane
from tests.server.test_tenant_faces import FACES, key_file
from tests.support.served import serving, wait_for


def test_many_connections_of_one_key_leave_places_for_others(tmp_path):
    most = part_of(136, 0)
    count = most + 20

    async def crowd(http, engine):
        body = {"prompt": "ab", "max_tokens": 240}
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=http.url, timeout=300, limits=limits) as client:
            post = lambda key: client.post("/v1/completions", json=body, headers={"x-api-key": key})
            many = [asyncio.ensure_future(post("ann1")) for _ in range(count)]
            await asyncio.to_thread(
                wait_for,
                lambda: engine.running == most and sum(task.done() for task in many) == count - most,
                120,
                0.05,
            )
            engine.at_once, engine.delay = 240, 0.0
            other = await post("bob1")
            answers = await asyncio.gather(*many)
        return other, answers

    with serving(api_key_file=str(key_file(tmp_path))) as (engine, http):
        engine.delay = 1.0
        other, answers = asyncio.run(crowd(http, engine))
    assert other.status_code == 200
    refused = [one for one in answers if one.status_code == 429]
    assert len(refused) == count - most and all(one.headers["retry-after"] for one in refused)
    words = f"{most} sequences of key 'ann' run or wait, and 1 more exceed the {most} that one client may have of 136"
    assert all(words in one.json()["error"]["message"] for one in refused)


def test_every_client_finds_places_while_others_hold_as_many_as_they_may():
    accounts, active = [Account(name) for name in "abcd"], 0
    for account in accounts:
        while True:
            try:
                account.check_places(1, 136, active)
            except Problem as problem:
                assert problem.status == 429 and problem.retry_after is None
                break
            account.running, active = account.running + 1, active + 1
    assert [account.running for account in accounts] == [119, 15, 2, 0] and active == 136
    accounts[0].running, active = 60, 77
    with pytest.raises(Problem, match="exceed the 105 that one client may have of 136 now"):
        accounts[0].check_places(46, 136, active)
    with pytest.raises(Problem, match="one client may have 119 of the server's 136") as error:
        accounts[3].check_places(120, 136, 0)
    assert error.value.status == 400 and part_of(8, 0) == 7 and part_of(6, 0) == 6
    accounts[0].under_way = 9
    with pytest.raises(Problem, match="9 requests of key 'a' are under way, of at most 9 of 10 now"):
        accounts[0].check_requests(10, 9)


def test_bodies_of_one_client_leave_a_place_to_others():
    async def crowd():
        lane = Lane(1, 8)
        await lane.wait("many")
        tasks = [asyncio.ensure_future(lane.wait("many")) for _ in range(7)]
        await asyncio.sleep(0)
        words = "7 requests wait to be tokenised, 7 of them of this client, of at most 8; try again later"
        with pytest.raises(Problem, match=words):
            await lane.wait("many")
        other = asyncio.ensure_future(lane.wait("other"))
        await asyncio.sleep(0)
        for _ in range(8):
            lane.turn.release()
        await asyncio.gather(*tasks, other)
        assert not lane._waiting

    asyncio.run(crowd())


def test_without_keys_a_client_is_an_address_and_busy_ones_are_not_forgotten():
    accounts = Accounts([], False, KeyLimits(max_running=1))
    first = accounts.at_address("2001:db8::1")
    assert accounts.at_address("2001:db8::2") is first and first.limits.max_running == 1 and first.name == "-"
    first.running = 7
    idle = accounts.at_address("10.0.0.1")
    for number in range(MAX_ADDRESSES):
        accounts.at_address(f"address {number}")
    assert accounts.at_address("2001:db8::1") is first and accounts.at_address("10.0.0.1") is not idle
    with pytest.raises(Problem, match="of address 2001:db8::/64 run or wait"):
        first.check_places(1, 8, 7)


def test_flags_limit_clients_whose_keys_have_no_limits_of_their_own():
    keys = [ApiKey("own", "k", KeyLimits(max_running=3)), ApiKey("none", "l")]
    accounts = Accounts(keys, False, KeyLimits(max_running=1, max_waiting=2, tokens_per_minute=9))
    own, none = accounts.find([b"k"]), accounts.find([b"l"])
    assert own.limits == KeyLimits(max_running=3, max_waiting=2, tokens_per_minute=9)
    assert none.limits == KeyLimits(max_running=1, max_waiting=2, tokens_per_minute=9)
    with pytest.raises(ConfigError, match=r"--max-waiting-per-key \(2\) needs --max-running-per-key: give both"):
        ServeConfig(max_waiting_per_key=2)


def test_limits_of_an_address():
    with serving(max_running_per_key=1, max_waiting_per_key=0, tokens_per_minute_per_key=30) as (_, http):
        post = lambda **body: httpx.post(f"{http.url}/v1/completions", json={"prompt": "a", "max_tokens": 2} | body)
        assert post().status_code == 200
        assert "2 sequences, which exceeds max_running 1 and max_waiting 0 of address 127.0.0.1" in post(n=2).text
        refused = post(prompt="a" * 29)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 1
        assert "29 more exceed tokens_per_minute 30 of address 127.0.0.1" in refused.text


def test_the_next_held_sequence_is_that_of_the_lowest_number():
    account = Account("a")
    for name, batch, priority in (("d", True, -5), ("c", False, 3), ("a", False, 0), ("b", False, 0)):
        message = Submit(name, b"", place=QueuePlace("a", batch, priority))
        account.held[name] = HeldMessage(message, lambda *_: None)
    assert [account.next_held().message.id for _ in range(4)] == ["a", "b", "c", "d"] and not account.held


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(api_key_file=str(key_file(tmp_path_factory.mktemp("keys")))) as pair:
        yield pair


@pytest.mark.parametrize("path", FACES)
def test_class_and_priority_reach_the_engine_on_every_face(served, path):
    engine, http = served
    ask = lambda **fields: httpx.post(http.url + path, json=FACES[path] | fields, headers={"x-api-key": "ann1"})

    def place(**fields):
        answered = ask(**fields)
        assert answered.status_code == 200, answered.text
        return engine.submitted[-1]["place"]

    plain = structs.asdict(ANY_PLACE) | {"client": "ann"}
    assert place() == place(priority=0, service_tier="auto") == plain
    assert place(priority=-7, service_tier="flex") == {"client": "ann", "batch": True, "priority": -7}
    for fields, words in (
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"priority": "high"}, "priority must be a whole number"),
        ({"priority": 1 << 60}, "must be from"),
        ({"service_tier": "gold"}, "service_tier 'gold' is not known; known are flex, batch, auto"),
    ):
        refused = ask(**fields)
        assert refused.status_code == 400 and words in refused.text


class Client:
    """The other end of a stream. It reads all, or nothing after `most` messages."""

    def __init__(self, most=1 << 30):
        self.got, self._most = [], most

    async def send(self, message):
        """Takes a message."""
        if len(self.got) >= self._most:
            await asyncio.Event().wait()
        self.got.append(message.get("body", b""))


def stream_to(client, events, path="/v1/chat/completions", stall=1e9, progress=time.monotonic):
    async def run():
        await EventStream(events, progress, 1e9, stall)({"path": path}, asyncio.Event().wait, client.send)

    asyncio.run(run())


@pytest.mark.parametrize("path, sign", [("/v1/messages", ANTHROPIC_PING), ("/v1/responses", KEEP_ALIVE)])
def test_a_stream_without_events_shows_signs_of_life(monkeypatch, path, sign):
    monkeypatch.setattr(answer, "KEEP_ALIVE_SECONDS", 0.02)
    client = Client()

    async def events():
        for number in range(2):
            await asyncio.to_thread(wait_for, lambda: client.got.count(sign) > 2 * number + 1)
            yield b"data: %d\n\n" % number

    stream_to(client, events(), path)
    assert [body for body in client.got if body != sign] == [b"", b"data: 0\n\n", b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert client.got[1:3] == [sign, sign], "also before the first event"


def test_signs_of_life_are_no_progress(monkeypatch):
    monkeypatch.setattr(answer, "KEEP_ALIVE_SECONDS", 0.02)
    client, begun = Client(), time.monotonic()

    async def events():
        await asyncio.sleep(60)
        yield b""

    async def run():
        stream = EventStream(events(), lambda: begun, 0.3, 1e9)
        await stream({"path": "/v1/messages"}, asyncio.Event().wait, client.send)

    asyncio.run(run())
    assert ANTHROPIC_PING in client.got and b"nothing has progressed for 0.3 seconds" in client.got[-1]


def test_a_client_that_reads_nothing_is_stopped_and_its_sequences_end(monkeypatch):
    monkeypatch.setattr(answer, "CHECK_SECONDS", 0.05)
    noted, ended = [], []
    monkeypatch.setattr(answer, "note_problem", noted.append)

    async def events():
        try:
            for number in itertools.count():
                yield b"data: %d\n\n" % number
        finally:
            ended.append(True)

    client = Client(most=4)
    stream_to(client, events(), stall=0.2)
    assert ended and len(client.got) == 4
    assert str(noted[0]) == "the client has read nothing for 0.2 seconds (--stall-timeout)"
