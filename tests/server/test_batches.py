"""Files and batches over HTTP: the calls of the openai and anthropic clients, restarts, limits, and strangers."""

import errno
import json
import shutil
import time
from types import SimpleNamespace

import httpx
import pytest

from ckdist.serve import batch_store
from ckdist.serve.batch_store import BatchStore
from ckdist.serve.problems import Problem
from tests.support.clients import anthropic, openai
from tests.support.served import serving, wait_for

KEYS = "[[key]]\nname = 'ann'\nkey = 'ann-secret'\n[[key]]\nname = 'bob'\nkey = 'bob-secret'\n"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys").write_text(KEYS)
    (folder / "keys").chmod(0o600)
    return folder


def flags(folder):
    return {"batch_dir": f"{folder / 'room'}:4M", "api_key_file": str(folder / "keys"), "parallel": 4}


@pytest.fixture(scope="module")
def server(folder):
    with serving(**flags(folder)) as (engine, http):
        yield engine, http.url


def client(server, name="ann"):
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key=f"{name}-secret", max_retries=0)


def lines(count, url=TEXT, **more):
    body = {"messages": [{"role": "user", "content": "a"}]} if url == CHAT else {"prompt": "ab"}
    made = (
        {"custom_id": f"id-{i}", "method": "POST", "url": url, "body": {**body, "max_tokens": 3, **more}}
        for i in range(count)
    )
    return "".join(json.dumps(one) + "\n" for one in made).encode()


def upload(api, data):
    return api.files.create(file=("in.jsonl", data), purpose="batch")


def ended(api, batch):
    seen = []

    def is_over():
        seen.append(api.batches.retrieve(batch.id))
        return seen[-1].status in ("completed", "failed", "cancelled", "expired")

    wait_for(is_over, 30, every=0.05)
    return seen[-1]


def test_a_file_of_requests_becomes_a_file_of_answers(server):
    api = client(server)
    file = upload(api, lines(7, CHAT))
    assert api.files.retrieve(file.id).bytes == len(lines(7, CHAT)) and file.id in [one.id for one in api.files.list()]
    batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    done = ended(api, batch)
    assert (done.status, done.request_counts.completed, done.request_counts.total) == ("completed", 7, 7)
    assert done.metadata == {"a": "b"} and done.error_file_id is None
    answers = [json.loads(line) for line in api.files.content(done.output_file_id).text.splitlines()]
    assert {one["custom_id"] for one in answers} == {f"id-{i}" for i in range(7)}
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)
    assert api.batches.list().data[0].id == batch.id
    assert server[0].submitted[-1]["place"]["batch"] is True
    for file_id in (file.id, done.output_file_id):
        assert api.files.delete(file_id).deleted


def test_wrong_lines_end_a_batch_before_it_runs(server):
    api, before = client(server), len(server[0].submitted)
    batch = api.batches.create(
        input_file_id=upload(api, lines(2) + b"{\n" + lines(1)).id, endpoint=TEXT, completion_window="24h"
    )
    failed = ended(api, batch)
    assert failed.status == "failed" and [error.line for error in failed.errors.data] == [3, 4]
    assert len(server[0].submitted) == before
    mixed = api.batches.create(input_file_id=upload(api, lines(1, CHAT)).id, endpoint=TEXT, completion_window="24h")
    assert "must be the batch's endpoint" in ended(api, mixed).errors.data[0].message


def test_a_cancelled_batch_keeps_its_results_and_names_the_rest(server):
    engine, _ = server
    api, engine.delay = client(server), 0.1
    try:
        file = upload(api, lines(60))
        batch = api.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
        wait_for(lambda: api.batches.retrieve(batch.id).request_counts.completed >= 3, 30)
        with pytest.raises(openai.ConflictError, match="is the input of"):
            api.files.delete(file.id)
        api.batches.cancel(batch.id)
        done = ended(api, batch)
    finally:
        engine.delay = 0.0
    kept = api.files.content(done.output_file_id).text.splitlines()
    rest = [json.loads(line) for line in api.files.content(done.error_file_id).text.splitlines()]
    assert done.status == "cancelled" and len(kept) >= 3 and len(kept) + len(rest) == 60
    assert {one["error"]["code"] for one in rest} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        api.batches.cancel(batch.id)


def test_message_batches_of_anthropics_client(server):
    api = anthropic.Anthropic(base_url=server[1], api_key="ann-secret", max_retries=0)
    params = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    requests = [{"custom_id": f"m{i}", "params": params} for i in range(3)]
    requests.append({"custom_id": "long", "params": {**params, "messages": [{"role": "user", "content": "a" * 400}]}})
    batch = api.messages.batches.create(requests=requests)
    wait_for(lambda: api.messages.batches.retrieve(batch.id).processing_status == "ended", 30, every=0.05)
    done = api.messages.batches.retrieve(batch.id)
    assert (done.request_counts.succeeded, done.request_counts.errored) == (3, 1)
    results = {one.custom_id: one.result for one in api.messages.batches.results(batch.id)}
    assert {name: result.type for name, result in results.items()} == {
        "m0": "succeeded", "m1": "succeeded", "m2": "succeeded", "long": "errored",
    }  # fmt: skip
    assert results["m0"].message.content[0].text and results["long"].error.error.type == "invalid_request_error"
    assert [one.id for one in api.messages.batches.list()] == [batch.id]
    api.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        api.messages.batches.retrieve(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="line 1: custom_id"):
        api.messages.batches.create(requests=[{"custom_id": "", "params": params}])


def test_clients_see_only_their_own(server):
    ann, bob = client(server), client(server, "bob")
    file = upload(ann, lines(1))
    batch = ann.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
    calls = (
        lambda: bob.files.retrieve(file.id), lambda: bob.files.content(file.id), lambda: bob.files.delete(file.id),
        lambda: bob.batches.retrieve(batch.id), lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h"),
        lambda: bob.files.retrieve("../keys"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call()
    assert not bob.files.list().data and not bob.batches.list().data
    ended(ann, batch)


def test_uploads_have_limits(server):
    _, url = server
    headers = {"Authorization": "Bearer ann-secret"}
    post = lambda **given: httpx.post(f"{url}/v1/files", headers={**headers, **given.pop("headers", {})}, **given)
    cases = [
        (post(files={"file": b"x"}, data={"purpose": "vision"}), 400, "purpose"),
        (post(data={"purpose": "batch"}, files={"other": b"x"}), 400, "has no file"),
        (post(files=[("file", b"x"), ("file", b"y")], data={"purpose": "batch"}), 400, "two files"),
        (post(content=b"--b\r\nnonsense", headers={"Content-Type": "multipart/form-data; boundary=b"}), 400, "form"),
        (post(content=b"x", headers={"Content-Type": "multipart/form-data; boundary=" + "b" * 999}), 400, "Boundary"),
        (post(json={}), 400, "must be multipart/form-data"),
        (post(files={"file": b"x" * (5 << 20)}, data={"purpose": "batch"}), 507, "--batch-dir"),
        (post(files={"file": b"x"}, data={"purpose": "y" * 5000}), 413, "1024 bytes"),
        (post(files={"file": b"x"}, headers={"Origin": "http://evil.example"}), 403, "web pages"),
    ]
    for answer, status, words in cases:
        assert answer.status_code == status and words in answer.text, answer.text


def test_a_batch_goes_on_after_a_restart(folder, tmp_path):
    given = {**flags(folder), "batch_dir": str(tmp_path / "room")}
    with serving(**given) as (engine, http):
        engine.delay = 0.05
        api = client((engine, http.url))
        batch = api.batches.create(input_file_id=upload(api, lines(40)).id, endpoint=TEXT, completion_window="24h")
        wait_for(lambda: api.batches.retrieve(batch.id).request_counts.completed >= 2, 30)
        first = engine
    with serving(**given) as (engine, http):
        api = client((engine, http.url))
        done = ended(api, batch)
        names = [json.loads(line)["custom_id"] for line in api.files.content(done.output_file_id).text.splitlines()]
        assert sorted(names) == sorted(f"id-{i}" for i in range(40))
        assert len(engine.submitted) < 40 and first.submitted


def test_an_expired_batch_ends(tmp_path, folder):
    room = tmp_path / "room"
    store = BatchStore(str(room), 1 << 20)
    with store.upload("ann") as path:
        path.write_bytes(lines(2))
        file = store.add_file("ann", path, "batch", "in.jsonl")
    facts = {"input_file_id": file["id"], "endpoint": TEXT, "metadata": {}}
    old = store.add_batch("ann", "openai", int(time.time()) - 5, facts)
    gone = store.add_batch("stranger", "openai", int(time.time()) + 500, facts)
    store.close()
    with serving(**{**flags(folder), "batch_dir": str(room)}) as (engine, http):
        api = client((engine, http.url))
        assert (
            ended(api, old_batch := api.batches.retrieve(old["id"])).status == "expired" and old_batch.id == old["id"]
        )
        assert not engine.submitted
    store = BatchStore(str(room), 1 << 20)
    assert (
        "key 'stranger' of the batch is gone" in store.batch("stranger", "openai", gone["id"])["errors"][0]["message"]
    )
    store.close()


def test_a_full_disk_is_a_507_and_loses_no_results(tmp_path, monkeypatch):
    store = BatchStore(str(tmp_path / "room"), 1 << 20)
    store._rows.execute("PRAGMA max_page_count=1")  # no more than there are
    results = tmp_path / "results"
    with pytest.raises(Problem, match=r"batches.sqlite cannot be written \(database or disk is full\)") as full:
        for _ in range(100):
            results.write_text("x")
            store.add_file("ann", results, "batch_output", "n" * 200)
    assert full.value.status == 507 and results.read_text() == "x"
    with pytest.raises(Problem, match="cannot be written to --batch-dir: No space left"), store.upload("ann"):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    store.check_room(0)
    with pytest.raises(Problem, match="has 1048576 bytes free, and 1 bytes and their rows need 1048577"):
        store.check_room(1)
    store.close()


def test_a_result_has_a_place_beside_the_most_files(tmp_path, monkeypatch):
    """Or its batch would never end, and those of all others would wait for it."""
    monkeypatch.setattr(batch_store, "MAX_FILES", 1)
    store = BatchStore(str(tmp_path / "room"), 1 << 20)
    with store.upload("ann") as path:
        path.write_text("{}")
        store.add_file("ann", path, "batch", "in.jsonl")
    with pytest.raises(Problem, match="1 files already, of at most 1"), store.upload("ann"):
        pass
    results = store.results("batch_1", "answers")
    results.write_text("{}")
    assert store.add_file("ann", results, "batch_output", "out.jsonl")["bytes"] == 2
    store.close()


def test_without_a_folder_and_with_a_wrong_one(folder, tmp_path):
    with serving() as (_, http):
        answer = httpx.get(f"{http.url}/v1/batches")
        assert answer.status_code == 404 and "--batch-dir" in answer.text
