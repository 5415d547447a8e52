"""Ollama's copy, pull and delete, by its client."""

import pathlib

import pytest

from ckdist.engine.load_model import BUNDLED
from tests.support import local_server
from tests.support.clients import ollama
from tests.support.running import running

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NUMBERS = {"num_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def client(cache):
    files = {name: (pathlib.Path(BUNDLED) / name).read_bytes() for name in FILES}
    given = pytest.MonkeyPatch()
    with local_server.running(local_server.model_hub({"o/r": files})) as hub:
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_HOME", str(cache)), ("HF_HUB_OFFLINE", "0")):
            given.setenv(name, value)
        with running("-m", str(BUNDLED), "-a", "a", "--models-max", "2", "-c", "128", "--allow-model-changes") as url:
            yield ollama.Client(host=url)
    given.undo()


def names(client):
    return {model.model for model in client.list().models}


def test_a_copy_is_a_further_name_until_it_is_deleted(client):
    assert client.copy("a", "b:latest").status == "success"
    assert client.generate("b", "ab", raw=True, options=NUMBERS).response
    for wrong, status in ((("a", "b"), 409), (("nix", "c"), 404), (("a", "../c"), 400)):
        with pytest.raises(ollama.ResponseError) as refused:
            client.copy(*wrong)
        assert refused.value.status_code == status
    assert client.delete("b").status == "success"
    with pytest.raises(ollama.ResponseError, match="there is no model 'b'"):
        client.generate("b", "ab")


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
