"""--slot-save-path: what a slot keeps, files of it over a restart, and files and names that are wrong."""

import json

import httpx
import pytest

from tests.support.served import serving

KEYS = "[[key]]\nname = 'ann'\nkey = 'ann-secret'\n[[key]]\nname = 'bob'\nkey = 'bob-secret'\n"


def as_key(url, name):
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {name}-secret"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(folder):
    keys = folder / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with serving(slot_save_path=str(folder / "saved"), api_key_file=str(keys), parallel=2) as (engine, http):
        yield engine, http.url


def act(client, slot, action, **body):
    return client.post(f"/slots/{slot}?action={action}", json=body)


def complete(client, prompt, **fields):
    return client.post("/completion", json={"prompt": prompt, "n_predict": 3, **fields}).json()


def test_a_slot_is_saved_erased_and_restored_as_a_prompt_that_is_read_ahead(server):
    engine, url = server
    with as_key(url, "ann") as ann:
        assert complete(ann, "one two", id_slot=1)["id_slot"] == 1
        saved = act(ann, 1, "save", filename="a.bin").json()
        assert saved["n_saved"] == 10 and saved["id_slot"] == 1 and saved["timings"]["save_ms"] >= 0
        assert act(ann, 1, "erase").json() == {"id_slot": 1, "n_erased": 10}
        assert act(ann, 1, "save", filename="b.bin").status_code == 400
        restored = act(ann, 0, "restore", filename="a.bin").json()
        assert (restored["n_restored"], restored["n_read"]) == (10, saved["n_written"])
        assert len(engine.submitted[-1]["prompt"]) == 10 and engine.submitted[-1]["sampling"]["max_tokens"] == 0
        assert act(ann, 0, "erase").json()["n_erased"] == 10


def test_a_request_without_a_slot_continues_the_slot_with_its_beginning(server):
    with as_key(server[1], "ann") as ann:
        complete(ann, "first", id_slot=0)
        complete(ann, "other", id_slot=1)
        complete(ann, "firstfirst", cache_prompt=False)
        text = "first" + complete(ann, "first")["content"]
        complete(ann, text + "!")
        assert act(ann, 1, "erase").json()["n_erased"] == len("other") + 3
        assert act(ann, 0, "erase").json()["n_erased"] == len(text) + 4


def test_files_and_slots_are_each_clients_own(server):
    with as_key(server[1], "ann") as ann, as_key(server[1], "bob") as bob:
        complete(ann, "ann's words", id_slot=0)
        assert act(ann, 0, "save", filename="mine").status_code == 200
        assert act(bob, 0, "restore", filename="mine").status_code == 404
        assert act(bob, 0, "save", filename="mine").status_code == 400


@pytest.mark.parametrize("name", ["../keys", "/etc/passwd", ".hidden", "", "a/b", "a" * 200, 3, None])
def test_names_stay_in_the_folder(server, name):
    with as_key(server[1], "ann") as ann:
        answer = act(ann, 0, "restore", filename=name)
        assert answer.status_code == 400 and "filename" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokens": []}, "has 0 tokens"),
        ({"tokens": [1 << 20]}, "damaged"),
        ({"tokens": [1] * 300}, "has 300 tokens; this server restores 1 to 255"),
        ({"tokens": ["x"]}, "damaged"),
        ({"tokens": [-1]}, "damaged"),
        ({"model": "other"}, "was saved from 'other'"),
        ({"salt": 3}, "damaged"),
        ({"version": 2}, "was saved from"),
        (b"{", "damaged"),
        (b"[" * 3000, "damaged"),
        (b"x" * 100_000, "damaged or too long"),
    ],
    ids=str,
)
def test_damaged_and_foreign_files_are_refused(server, folder, change, words):
    with as_key(server[1], "ann") as ann:
        complete(ann, "words", id_slot=0)
        act(ann, 0, "save", filename="whole")
        (path,) = (folder / "saved").glob("*/whole")
        about = json.loads(path.read_bytes())
        path.write_bytes(change if isinstance(change, bytes) else json.dumps(about | change).encode())
        answer = act(ann, 0, "restore", filename="whole")
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("slot, action", [("2", "save"), ("9" * 20, "save"), ("x", "erase"), ("0", "load")])
def test_wrong_slots_and_actions(server, slot, action):
    with as_key(server[1], "ann") as ann:
        answer = act(ann, slot, action, filename="a")
        assert answer.status_code == 400 and (slot == "0" or f"id_slot ('{slot}')" in answer.text)
        assert "id_slot (7) must be from 0 to 1" in json.dumps(complete(ann, "a", id_slot=7))


def test_without_a_folder_the_answer_says_so():
    with serving() as (_, http):
        answer = httpx.post(f"{http.url}/slots/0?action=save", json={"filename": "a"})
        assert answer.status_code == 501 and "--slot-save-path" in answer.json()["error"]["message"]
