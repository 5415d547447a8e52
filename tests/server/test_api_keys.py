"""API keys: files and their modes, keys that change in a running server, limits, and clients that guess."""

import concurrent.futures
import os
import signal
import time

import httpx
import pytest

from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve import accounts, failed_keys
from ckdist.serve.accounts import Account, Accounts
from ckdist.serve.api_keys import ApiKey, KeyLimits, asks_for_key, given_keys, read_key_file
from ckdist.serve.failed_keys import FREE_FAILURES, MAX_ENTRIES, FailedKeys, network
from ckdist.serve.problems import Problem
from tests.server.test_tenant_faces import key_file
from tests.support.served import serving, wait_for

LIMITED = """
[[key]]
name = "small"
key = "s"
max_running = 2
max_waiting = 3

[[key]]
name = "slow"
key = "t"
tokens_per_minute = 40

[[key]]
name = "free"
key = "f"
"""


def ask(url, key, **fields):
    body = {"prompt": "abc", "max_tokens": 2} | fields
    return httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_a_file_of_tables_and_a_file_of_lines(tmp_path):
    keys = read_key_file(str(key_file(tmp_path, LIMITED)))
    assert [(item.name, item.key) for item in keys] == [("small", "s"), ("slow", "t"), ("free", "f")]
    assert keys[0].limits == KeyLimits(max_running=2, max_waiting=3) and keys[2].limits == KeyLimits()
    one, two = read_key_file(str(key_file(tmp_path, "one\n\n two \none\n")))
    assert (one.key, two.key) == ("one", "two") and one.name.startswith("key-") and one.tenant != two.tenant
    assert "small" in repr(keys) and "'s'" not in repr(keys)


@pytest.mark.parametrize(
    "text, words",
    [
        ("\n", "holds no key; write one per line, or tables"),
        ("a key\n", "key 1 must have 1 to 4096 characters, and no spaces"),
        ('name = "a"\n', "no spaces"),
        ("k\n" * 100_000, "100000 API keys were given; at most 1000 are allowed"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_runing = 1\n', "key 1: 'max_runing' is not known; known are name, key"),
        ('[[keys]]\nname = "a"\n', "'keys' is not known; write one table"),
        ('[key]\nname = "a"\n', "'key' is not known; write one table"),
        ('[[key]]\nname = "a b"\nkey = "k"\n', "key 1 needs a name of 1 to 64 letters"),
        ('[[key]]\nname = "a"\n', "key 1 (a) needs a key, which is a string"),
        ('[[key]]\nname = "a"\nkey = ""\n', "key 1 must have 1 to 4096"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_running = 0\n', "max_running must be a whole number from 1, not 0"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_running = true\n', "must be a whole number from 1, not True"),
        ('[[key]]\nname = "a"\nkey = "k"\nmodels = 1\n', "models must be true or false, not 1"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_waiting = 1\n', "max_waiting needs max_running"),
        ('[[key]]\nname = "a"\nkey = "k"\n' * 2 + '[[key]]\nname = "b"\nkey = "k"\n', "'b' and 'a' have the same key"),
        ('[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "a"\nkey = "l"\nmax_running = 1\n', "different limits"),
        ("[[key]\n", "is not TOML"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        read_key_file(str(key_file(tmp_path, text)))
    assert words in str(error.value) and str(error.value).startswith(f"--api-key-file {tmp_path}")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match=rf"can be read by others \(mode {mode:o}\): chmod 600 {path}$"):
        read_key_file(str(path))


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, words in (
        ("/dev/zero", "it is not a regular file"),
        (str(tmp_path / "pipe"), "it is not a regular file"),
        (str(tmp_path), "it is not a regular file"),
        (str(tmp_path / "none"), "No such file"),
        ("a\0b", "null"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_key_file(path)


def test_keys_of_the_command_line_and_of_the_environment(monkeypatch, caplog):
    names = lambda **flags: [item.key for item in given_keys(ServeConfig(**flags))]
    assert names() == [] and not asks_for_key(ServeConfig())
    monkeypatch.setenv("CKDIST_API_KEY", "one, two")
    assert names() == ["one", "two"] and asks_for_key(ServeConfig()) and not caplog.records
    assert names(api_key="three") == ["three"]
    assert "every user of this host sees --api-key" in caplog.text
    monkeypatch.setenv("CKDIST_API_KEY", "")
    for flags, words in (({}, "CKDIST_API_KEY is empty"), ({"api_key": " ,"}, "--api-key is empty")):
        with pytest.raises(ConfigError, match=words):
            given_keys(ServeConfig(**flags))


def test_sighup_reads_the_keys_again(tmp_path, capfd):
    """A file that is wrong changes nothing, and a process that is started later has the keys of the file."""
    file = key_file(tmp_path, "old\n")
    with serving(api_key_file=str(file)) as (_, http):
        assert ask(http.url, "old").status_code == 200 and ask(http.url, "new").status_code == 401
        key_file(tmp_path, "new\n")
        http.read_keys_again()
        wait_for(lambda: ask(http.url, "new").status_code == 200, every=0.1)
        assert ask(http.url, "old").status_code == 401
        for text, mode in (("[[key]\n", 0o600), ("other\n", 0o644)):
            key_file(tmp_path, text, mode)
            http.read_keys_again()
            time.sleep(0.3)
            assert ask(http.url, "new").status_code == 200
        key_file(tmp_path, "third\n")
        pid = http.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: http.pid != pid)
        http.read_keys_again()  # before it can handle the signal
        wait_for(lambda: httpx.get(http.url + "/health", timeout=60).status_code == 200, 60, every=0.2)
        assert ask(http.url, "third").status_code == 200 and ask(http.url, "new").status_code == 401
    said = capfd.readouterr().err
    assert said.count("the API keys stay as they were") == 2 and "chmod 600" in said and "is not TOML" in said


def test_limits_of_sequences(tmp_path):
    """Two run and three wait, here, until others are done; what is more is a 429 with both numbers."""
    with serving(api_key_file=str(key_file(tmp_path, LIMITED))) as (engine, http):
        engine.delay = 0.02
        most, pool = 0, concurrent.futures.ThreadPoolExecutor(8)
        answers = [pool.submit(ask, http.url, "s", max_tokens=20, n=5)]
        wait_for(lambda: engine.running == 2)
        refused = ask(http.url, "s")
        assert refused.status_code == 429 and "retry-after" in refused.headers
        words = "5 sequences run or wait, and 1 more exceed max_running 2 and max_waiting 3 of key 'small'"
        assert words in refused.json()["error"]["message"]
        assert ask(http.url, "f").status_code == 200  # others have their own places
        wait_for(lambda: engine.running <= 2)  # the engine forgets a sequence after its last tokens are sent
        while not all(answer.done() for answer in answers):
            most = max(most, engine.running)
            time.sleep(0.005)
        assert most == 2 and answers[0].result().status_code == 200
        assert len(answers[0].result().json()["choices"]) == 5
        too_many = ask(http.url, "s", n=6)
        assert too_many.status_code == 400 and "asks for 6 sequences, which exceeds max_running 2" in too_many.text
        assert ask(http.url, "s", n=5).status_code == 200


def test_clients_that_leave_make_room_for_those_that_wait(tmp_path):
    with serving(api_key_file=str(key_file(tmp_path, LIMITED))) as (engine, http):
        engine.delay = 0.02
        with concurrent.futures.ThreadPoolExecutor(8) as pool:

            def leave():
                with pytest.raises(httpx.ReadTimeout):
                    body = {"prompt": "abc", "max_tokens": 200, "n": 4}
                    httpx.post(http.url + "/v1/completions", json=body, headers={"x-api-key": "s"}, timeout=0.5)

            pool.submit(leave).result()
            assert ask(http.url, "s", n=5).status_code == 200
        assert len(engine.submitted) < 4 + 5  # those that waited when their client left were never sent


def test_limit_of_tokens(tmp_path):
    with serving(api_key_file=str(key_file(tmp_path, LIMITED))) as (_, http):
        assert ask(http.url, "t", prompt="a" * 20, max_tokens=10).status_code == 200
        refused = ask(http.url, "t", prompt="a" * 11)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 62
        words = "30 tokens were used within a minute, and 11 more exceed tokens_per_minute 40 of key 'slow'"
        assert words in refused.json()["error"]["message"]
        never = ask(http.url, "t", prompt="a" * 41)
        assert never.status_code == 400 and "41 tokens exceed tokens_per_minute 40" in never.text
        vectors = httpx.post(http.url + "/v1/embeddings", json={"input": "a" * 11}, headers={"x-api-key": "t"})
        assert vectors.status_code == 429 and "tokens_per_minute 40" in vectors.text
        assert ask(http.url, "t", prompt="a" * 8).status_code == 200


def test_tokens_are_forgotten_after_a_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(accounts.time, "monotonic", lambda: now[0])
    account = Account("a", b"", KeyLimits(tokens_per_minute=100))
    account.take_tokens(60)
    now[0] += 30
    account.take_tokens(40)
    with pytest.raises(Problem) as problem:
        account.take_tokens(50)
    assert problem.value.status == 429 and 30 <= problem.value.retry_after <= 32
    now[0] += problem.value.retry_after
    account.take_tokens(50)
    with pytest.raises(Problem):
        account.take_tokens(20)


def test_a_name_that_stays_keeps_its_account():
    known = Accounts([ApiKey("a", "k"), ApiKey("b", "l")], shared_cache=False)
    account = known.find([b"k"])
    known.replace([ApiKey("a", "new", KeyLimits(max_running=1))])
    assert known.find([b"new"]) is account and account.limits.max_running == 1
    assert known.find([b"k"]) is None and known.find([]) is None and known.find([b"", b"new"]) is account


def test_addresses_that_guess_have_to_wait(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(failed_keys.time, "monotonic", lambda: now[0])
    known, waits = FailedKeys(), []
    known.accept("10.0.0.1", "ann")
    for _ in range(FREE_FAILURES + 8):
        known.add("10.0.0.1")
        waits.append(known.wait_seconds("10.0.0.1"))
        now[0] += waits[-1]
    assert waits == [0] * (FREE_FAILURES - 1) + [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert known.wait_seconds("10.0.0.1") == known.wait_seconds("10.0.0.2") == 0
    assert known.has_accepted("10.0.0.1", "ann") and not known.has_accepted("10.0.0.2", "ann")
    now[0] += 601
    known.add("10.0.0.1")
    assert known.wait_seconds("10.0.0.1") == 0
    for number in range(3 * MAX_ENTRIES):
        known.add(str(number))
        known.accept(str(number), "ann")
    assert len(known._failures) == len(known._accepted) == MAX_ENTRIES
    assert network("2001:db8:1:2:3:4:5:6") == network("2001:db8:1:2::1") != network("2001:db8:1:3::1")
    assert network("fe80::1%eth0") == "fe80::/64" and network("x:y") == "x:y"


def test_guesses_are_counted_and_slowed_down_and_others_go_on():
    with serving(api_key="right,second") as (_, http):
        assert ask(http.url, "right").status_code == 200
        statuses = [ask(http.url, f"wrong{number}").status_code for number in range(FREE_FAILURES + 1)]
        assert statuses == [401] * FREE_FAILURES + [429]
        refused = ask(http.url, "second")  # a right key that this address has never had is not looked at
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "too many wrong API keys" in refused.text
        assert ask(http.url, "right").status_code == 200
        for _ in range(FREE_FAILURES):  # no key is no guess
            assert httpx.get(http.url + "/v1/models").status_code in (401, 429)
        metrics = httpx.get(http.url + "/metrics", headers={"x-api-key": "right"}).text
        assert f"ckdist_failed_keys_total {FREE_FAILURES + 1}.0" in metrics
        wait_for(lambda: ask(http.url, "second").status_code == 200, 30, every=0.3)


def test_the_environments_key_does_not_reach_the_http_process(monkeypatch):
    monkeypatch.setenv("CKDIST_API_KEY", "from-the-environment")
    with serving() as (_, http):
        assert ask(http.url, "from-the-environment").status_code == 200
        with open(f"/proc/{http.pid}/environ", "rb") as file:
            assert b"from-the-environment" not in file.read()
