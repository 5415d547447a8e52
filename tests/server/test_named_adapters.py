"""Adapters that requests name, over HTTP: how they are named, loaded and unloaded, and what is refused."""

import asyncio
import contextlib
import errno
import json
import pathlib
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from ckdist.cli.main import run
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError, RequestError
from ckdist.serve import adapter_uploads
from ckdist.serve.accounts import Account
from ckdist.serve.api_keys import KeyLimits
from ckdist.serve.problems import Problem
from tests.support.adapters import as_gguf, random_adapter
from tests.support.running import running

PEFT = ("adapter_config.json", "adapter_model.safetensors")
KIND = "multipart/form-data; boundary=x"
PART = '--x\r\nContent-Disposition: form-data; name="adapter_config.json"; filename="c"\r\n\r\n'
BODY = {"prompt": "def main(", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("first", "second", "wide")):
        random_adapter(
            folder / name, BUNDLED, ("q_proj", "down_proj"), seed=seed, rank=17 if name == "wide" else 4, scale=0.4
        )
    return folder


@pytest.fixture(scope="module")
def http(folder):
    flags = (
        "--lora",
        f"one={folder / 'first'}",
        "--max-loras",
        "2",
        "--lora-dir",
        str(folder),
        "-a",
        "base",
        "--lora-uploads",
        "1M",
    )
    with running(*flags) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def text(http, **fields):
    answer = http.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["model"]


def load(http, name, path, **more):
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def until(holds):
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def unload(http, name):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_an_adapter_is_named_by_model_or_lora(http):
    base, one = text(http), text(http, model="one")
    assert base == text(http, model="base") == (base[0], "base") and one == (one[0], "one")
    assert one[0] != base[0] and one == text(http, model="base:one") == text(http, lora=[{"id": 0, "scale": 1}])
    assert text(http, lora=[{"id": 0, "scale": 0}]) == base
    assert [(m["id"], m["parent"]) for m in http.get("/v1/models").json()["data"]] == [("base", None), ("one", "base")]
    assert http.get("/lora-adapters").json() == [{"id": 0, "path": "one", "scale": 0.0}]


@pytest.mark.parametrize(
    "fields, status, message",
    [
        ({"model": "two"}, 404, "there is no model 'two'; this server has 'base', 'one'"),
        ({"lora": [{"id": 7}]}, 404, "there is no adapter with id 7; loaded are 0 (one)"),
        ({"lora": [{"id": 0, "scale": 1e4}]}, 400, "scale must be a number from -1000 to 1000, not 10000.0"),
        ({"lora": [{"id": 0, "scale": "1"}]}, 400, "scale must be a number from -1000 to 1000, not 1"),
        ({"lora": [3]}, 400, 'lora must be a list like [{"id": 0, "scale": 1.0}]'),
    ],
)
def test_what_is_not_there_is_refused_with_the_names_that_are(http, fields, status, message):
    answer = http.post("/v1/completions", json={**BODY, **fields})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)


def test_scales_are_those_of_a_request_or_of_the_server(http):
    base, one, half = text(http), text(http, model="one"), text(http, lora=[{"id": 0, "scale": 0.5}])
    assert len({base[0], one[0], half[0]}) == 3 and half[1] == "one"
    assert text(http, model="one", lora=[{"id": 0, "scale": 0.5}]) == half
    assert load(http, "two", "first").status_code == 200
    many = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 2}]
    both = text(http, lora=many)
    assert both == text(http, lora=many[::-1]) and both[1] == "base" and both[0] not in (base[0], one[0], half[0])
    assert text(http, lora=many, model="two") == both
    refused = http.post("/v1/completions", json={**BODY, "lora": many[:1], "model": "two"})
    assert refused.status_code == 400 and "model names adapter 'two', and lora 'one': add it to lora" in refused.text
    assert (
        http.post("/lora-adapters", json=many).json()["success"] and text(http) == both and text(http, lora=[]) == base
    )
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0.5, 2.0]
    for wrong in ({}, [3], [{"id": 0}, {"id": 0, "scale": 2}], [{"id": True}], [{"id": 0, "scale": True}]):
        assert http.post("/lora-adapters", json=wrong).status_code == 400, wrong
    assert http.post("/lora-adapters", json=[{"id": 9}]).status_code == 404
    assert http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0}]).json()["success"]
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0.5, 0.0]
    assert text(http) == text(http, model="base") == half and text(http, lora=[]) == base
    assert text(http, model="one") == one == (*text(http, model="two")[:1], "one")
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    assert http.post("/lora-adapters", json=[{"id": 1}]).status_code == 200 and text(http)[1] == "two"
    assert unload(http, "two").status_code == 200 and text(http) == base


def test_an_adapter_is_loaded_and_replaced_while_requests_run_and_has_blocks_of_its_own(http, folder):
    long = {**BODY, "model": "one", "max_tokens": 200, "ignore_eos": True}
    expected = http.post("/v1/completions", json=long).json()["choices"][0]["text"]
    found = []
    stream = threading.Thread(target=lambda: found.append(http.post("/v1/completions", json=long).json()))
    stream.start()
    prompt = "import os\n" * 20
    assert load(http, "two", "first").status_code == 200
    assert text(http, model="two") == (text(http, model="one")[0], "two")
    before = text(http, model="two", prompt=prompt)
    usage = lambda **fields: http.post("/v1/completions", json={**BODY, "prompt": prompt, **fields}).json()["usage"]
    assert usage(model="two")["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage(model="base")["prompt_tokens_details"]["cached_tokens"] == 0
    assert "is loaded; unload it first" in load(http, "two", "second").json()["error"]["message"]
    assert "all 2 slots of --max-loras hold adapters" in load(http, "three", "second").json()["error"]["message"]
    assert unload(http, "two").status_code == 200 and unload(http, "two").status_code == 404
    assert load(http, "two", folder / "second").status_code == 200
    assert usage(model="two")["prompt_tokens_details"]["cached_tokens"] == 0
    assert text(http, model="two", prompt=prompt) != before
    assert unload(http, "two").status_code == 200
    stream.join()
    assert found[0]["choices"][0]["text"] == expected


def test_an_adapter_in_gguf_gives_the_text_of_the_one_in_peft_s_format(http, folder):
    as_gguf(folder / "first.gguf", folder / "first", BUNDLED)
    assert load(http, "gguf", "first.gguf").status_code == 200
    assert text(http, model="gguf")[0] == text(http, model="one")[0]
    assert unload(http, "gguf").status_code == 200


def test_hostile_folders_are_refused_with_one_line(http, folder, tmp_path):
    shutil.copytree(folder / "second", tmp_path / "out")
    (folder / "link").symlink_to(tmp_path / "out")
    for path in (tmp_path / "out", "../", "link", "none", "a\0b", "/etc"):
        answer = load(http, "two", path)
        assert (
            answer.status_code == 400 and "is no folder or file within --lora-dir" in answer.json()["error"]["message"]
        ), path
    broken = folder / "broken"
    shutil.copytree(folder / "second", broken)
    weights = broken / "adapter_model.safetensors"
    for data in (b"", b"\xff" * 8 + b"{}", weights.read_bytes()[:-5]):
        weights.write_bytes(data)
        answer = load(http, "two", "broken")
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
    with weights.open("wb") as file:
        file.truncate(1 << 40)
    assert "bytes, and an adapter of this model has at most" in load(http, "two", "broken").json()["error"]["message"]
    message = load(http, "two", "wide").json()["error"]["message"]
    assert "rank 17" in message and "--max-lora-rank 17" in message
    config = json.loads((folder / "second/adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"r": 1 << 40}))
    assert load(http, "two", "broken").status_code == 400
    random_adapter(folder / "nan", BUNDLED, ("q_proj",), rank=2, scale=float("nan"))
    assert "has values that are not finite" in load(http, "two", "nan").text
    assert "lora_name ('xxx" in load(http, "x" * 300, "second").text
    assert load(http, "a/b", "second").status_code == 400 and load(http, "base", "second").status_code == 400
    assert [entry["path"] for entry in http.get("/lora-adapters").json()] == ["one"]
    assert text(http, model="one")[1] == "one"
    assert pathlib.Path(folder).exists()


def test_a_continued_response_has_the_adapter_that_it_names(http):
    first = http.post("/v1/responses", json={"model": "one", "input": "x", "max_output_tokens": 2}).json()
    more = {"input": "y", "max_output_tokens": 2, "previous_response_id": first["id"]}
    assert http.post("/v1/responses", json={**more, "model": "one"}).json()["model"] == first["model"] == "one"
    unknown = http.post("/v1/responses", json={**more, "model": "two"})
    assert unknown.status_code == 404 and "there is no model 'two'" in unknown.text


def test_vectors_have_no_adapter(http):
    answer = http.post("/v1/embeddings", json={"input": "a", "model": "one"})
    assert answer.status_code == 400 and "adapter 'one' makes no vectors" in answer.json()["error"]["message"]


def test_push_uploads_or_copies_and_replaces_an_adapter(http, folder, tmp_path, capsys):
    push = lambda adapter, *flags: run(["push", str(adapter), str(http.base_url), "--name", "pushed", *flags], None)
    shutil.copytree(folder / "first", tmp_path / "mine")  # a folder that the server does not read from
    assert push(folder / "second") == 0 and "has the adapter pushed" in capsys.readouterr().out
    second = text(http, model="pushed")[0]
    with pytest.raises(RequestError, match="'pushed' was uploaded before: set load_inplace"):
        push(tmp_path / "mine")
    with pytest.raises(RequestError, match="all 2 slots of --max-loras hold adapters"):  # the old one goes last
        push(tmp_path / "mine", "--replace")
    assert unload(http, "pushed").status_code == 200
    assert load(http, "pushed", "uploads/pushed").status_code == 200 and text(http, model="pushed")[0] == second
    assert unload(http, "pushed").status_code == 200
    for flags in ((), ("--copy-to", str(folder)), ("--copy-to", str(folder))):  # the last one replaces the copy
        assert push(tmp_path / "mine", "--replace", *flags) == 0
        assert text(http, model="pushed")[0] == text(http, model="one")[0] != second
        assert unload(http, "pushed").status_code == 200
    as_gguf(tmp_path / "first.gguf", folder / "first", BUNDLED)
    assert push(tmp_path / "first.gguf", "--replace") == 0
    assert text(http, model="pushed")[0] == text(http, model="one")[0]
    assert [(file["id"], file["loaded"]) for file in http.get("/v1/lora_uploads").json()["data"]] == [("pushed", True)]
    assert http.delete("/v1/lora_uploads/pushed").status_code == 200
    assert http.delete("/v1/lora_uploads/pushed").status_code == 404 and not list((folder / "uploads").iterdir())
    with pytest.raises(ConfigError, match="pushed exists: give --replace, or another --name"):
        push(tmp_path / "mine", "--copy-to", str(folder))
    with pytest.raises(ConfigError, match="is no adapter: give a GGUF, or the folder"):
        push(tmp_path)
    with pytest.raises(ConfigError, match="must be of letters"):
        run(["push", str(tmp_path), "--name", "../x"], None)
    assert not list(folder.glob(".push-*"))


def test_hostile_uploads_leave_nothing(http, folder):
    config, weights = ((folder / "second" / file).read_bytes() for file in PEFT)
    forms = lambda config, weights: {PEFT[0]: ("../../x", config), PEFT[1]: ("/etc/passwd", weights)}
    good = forms(config, weights)
    post = lambda name, **given: http.post(f"/v1/lora_uploads/{name}", **given)
    cases = [
        (post("..%2Fx", files=good), 400, "lora_name ('../x') must be"),
        (post(".part-1", files=good), 400, "must be at most 100 letters"),
        (post("base", files=good), 400, "is the model's name"),
        (post("two", files={PEFT[0]: config}), 400, "the form must have adapter_config.json and adapter_model"),
        (post("two", files={"file": config}), 400, "the form has no file"),
        (post("two", json={}), 400, "must be multipart/form-data"),
        (post("two", files=forms(config, weights[:-5])), 400, "two/adapter_model.safetensors"),
        (post("two", files=forms(b"{", weights)), 400, "two/adapter_config.json"),
        (post("two", files=forms(config, b"\xff" * 8 + b"{}")), 400, "two/adapter_model.safetensors"),
        (post("two", files=forms(config, bytes(1 << 22))), 507, "of at most 1048576 (--lora-uploads)"),
        (post("two", files=good, headers={"Origin": "http://evil.example"}), 403, "may not use this server"),
    ]
    for answer, status, message in cases:
        told = answer.json()["error"]["message"]
        assert answer.status_code == status and message in told and "\n" not in told, (told, message)
    with socket.create_connection((http.base_url.host, http.base_url.port), 10) as client:  # it goes in mid-form
        head = f"POST /v1/lora_uploads/two HTTP/1.1\r\nHost: localhost\r\nContent-Type: {KIND}\r\n"
        client.sendall(f"{head}Content-Length: 999999\r\n\r\n{PART}".encode())
        assert until(lambda: list((folder / "uploads").iterdir()))
        unsized = post("two", content=iter([PART.encode(), bytes(1 << 20)]), headers={"Content-Type": KIND})
        assert unsized.status_code == 413 and "bytes, which are allowed" in unsized.text
        assert "have or may get 999999 bytes" in post("three", files=forms(config, bytes(200_000))).text
    assert until(lambda: not list((folder / "uploads").iterdir()))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(post("two", files=good).status_code)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) in ([200, 400], [200, 409])
    assert sorted(file.name for file in (folder / "uploads/two").iterdir()) == list(PEFT)
    assert http.delete("/v1/lora_uploads/two").status_code == 200
    assert [entry["path"] for entry in http.get("/lora-adapters").json()] == ["one"]


@pytest.mark.parametrize(
    "size, file, models, refusal",
    [
        (1, None, None, None),
        (1, "keys.toml", True, None),
        (1, "keys.toml", None, "needs models = true in the file of --api-key-file"),
        (0, None, True, "only if the server was started with --lora-dir DIR --lora-uploads SIZE"),
    ],
)
def test_uploads_need_the_flag_and_the_right_of_the_key(tmp_path, size, file, models, refusal):
    settings = SimpleNamespace(lora_dir=str(tmp_path), lora_uploads=size, api_key_file=file)
    request = SimpleNamespace(scope={"ckdist.account": Account(limits=KeyLimits(models=models))})
    with pytest.raises(Problem, match=refusal) if refusal else contextlib.nullcontext():
        adapter_uploads.room_of(SimpleNamespace(settings=settings), request)


def test_a_slow_or_full_upload_ends_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_uploads, "SECONDS", 0.05)
    room = adapter_uploads.UploadRoom(tmp_path / "uploads", 1 << 20)

    async def upload(pieces):
        async def stream():
            for piece in pieces:
                yield piece
            await asyncio.sleep(10)

        request = SimpleNamespace(headers={"content-type": KIND}, stream=stream)
        async with room.receive(request, "slow", False):
            raise AssertionError("nothing came")

    with pytest.raises(Problem, match="did not arrive within 0 seconds"):
        asyncio.run(upload([PART.encode()]))
    monkeypatch.setattr(adapter_uploads, "receive_form", full_disk)
    with pytest.raises(Problem, match="cannot be written to --lora-dir: No space left on device"):
        asyncio.run(upload([]))
    assert not list((tmp_path / "uploads").iterdir())


async def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
