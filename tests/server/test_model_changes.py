"""Ollama's copy, pull and delete, by its client."""

import pathlib

import pytest

from ckdist.engine.load_model import BUNDLED
from tests.support import local_server
from tests.support.adapters import random_adapter
from tests.support.clients import ollama
from tests.support.running import running

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
LOADS = ("unload", "load")
ADAPTERS = ((("one", "c"), 400), (("a:one", "c"), 400), (("a", "one"), 409))
NUMBERS = {"num_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def clients(cache):
    """Of a key with the right to change models, and of one without."""
    files = {name: (pathlib.Path(BUNDLED) / name).read_bytes() for name in FILES}
    given = pytest.MonkeyPatch()
    with local_server.running(local_server.model_hub({"o/r": files})) as hub:
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_HOME", str(cache)), ("HF_HUB_OFFLINE", "0")):
            given.setenv(name, value)
        keys = cache / "keys"
        keys.touch(mode=0o600)
        keys.write_text(
            '[[key]]\nname = "may"\nkey = "may-key"\nmodels = true\n[[key]]\nname = "not"\nkey = "not-key"\n'
        )
        random_adapter(cache / "one", BUNDLED, ("q_proj",), rank=2)
        flags = ("--lora", f"one={cache / 'one'}", "--models-max", "2", "-c", "128", "--api-key-file", str(keys))
        with running("-m", str(BUNDLED), "-a", "a", *flags) as url:
            yield [ollama.Client(host=url, headers={"Authorization": f"Bearer {key}-key"}) for key in ("may", "not")]
    given.undo()


@pytest.fixture
def client(clients):
    return clients[0]


def names(client):
    return {model.model for model in client.list().models}


def test_a_copy_is_a_further_name_until_it_is_deleted(client):
    assert client.copy("a", "b:latest").status == "success"
    assert client.generate("b", "ab", raw=True, options=NUMBERS).response
    for wrong, status in ((("a", "b"), 409), (("b", "b"), 409), (("nix", "c"), 404), (("a", "../c"), 400), *ADAPTERS):
        with pytest.raises(ollama.ResponseError) as refused:
            client.copy(*wrong)
        assert refused.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="/api/create is not supported: clients cannot make or push models"):
        client.create("new", from_="a")
    assert client.delete("b").status == "success"
    with pytest.raises(ollama.ResponseError, match="there is no model 'b'"):
        client.generate("b", "ab")


def test_only_a_key_with_the_right_changes_models(clients):
    client = clients[1]
    assert client.generate("a", "ab", raw=True, options=NUMBERS).response and client.pull("a").status == "success"
    orders = [lambda path=path: client._request_raw("POST", f"/models/{path}", json={"model": "a"}) for path in LOADS]
    for change in (
        lambda: client.copy("a", "c"),
        lambda: client.delete("a"),
        lambda: client.pull("hf.co/o/r"),
        *orders,
    ):
        with pytest.raises(ollama.ResponseError, match="only with a key that has models = true") as refused:
            change()
        assert refused.value.status_code == 403
    for path in LOADS:
        assert clients[0]._request_raw("POST", f"/models/{path}", json={"model": "a"}).json()["success"]


def test_a_pulled_model_answers_as_the_same_file_and_is_deleted_with_it(client, cache):
    lines = list(client.pull("hf.co/o/r", stream=True))
    assert lines[0].status == "pulling manifest" and lines[-1].status == "success"
    assert any(line.total == line.completed > 1_000_000 for line in lines if line.total)
    assert "hf.co/o/r" in names(client) and client.pull("hf.co/o/r").status == "success"
    texts = [client.generate(name, "ab", raw=True, options=NUMBERS).response for name in ("a", "hf.co/o/r")]
    assert texts[0] == texts[1] != ""
    stored = lambda: [file for file in cache.rglob("*") if file.is_file() and file.stat().st_size > 1_000_000]
    assert stored()
    assert client.delete("hf.co/o/r").status == "success"
    assert names(client) == {"a"} and not stored()


@pytest.mark.parametrize("name, status", [("a", 403), ("nix", 404)])
def test_only_what_clients_have_added_is_deleted(client, name, status):
    with pytest.raises(ollama.ResponseError) as refused:
        client.delete(name)
    assert refused.value.status_code == status


@pytest.mark.parametrize("name", ["/etc/passwd", "http:x", "nix", "hf.co/o/nix"])
def test_only_names_of_models_are_pulled(client, name):
    with pytest.raises(ollama.ResponseError) as refused:
        client.pull(name)
    assert refused.value.status_code in (400, 404)
