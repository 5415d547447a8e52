"""Several models behind one address: by name, on demand, within limits, and through crashes."""

import contextlib
import json
import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from ckdist.engine.load_model import BUNDLED
from tests.support.adapters import random_adapter
from tests.support.resumed_streams import BODIES, streamed
from tests.support.running import running
from tests.support.served import wait_for

TABLE = f"""
[[model]]
name = "a"
path = "{BUNDLED}"
aliases = ["gpt-4o"]
ctx-size = 512
load = "start"
[[model]]
name = "b"
path = "{BUNDLED}"
ctx_size = 256
memory = "400M"
[[model]]
name = "c"
path = "{BUNDLED}"
cache_type_k = "q8_0"
ctx_size = 256
prefill_file = "FOLDER/system.txt"
slot_save_path = "FOLDER/slots"
trace = "FOLDER/trace.json"
[[model]]
name = "idle"
aliases = ["rests"]
path = "{BUNDLED}"
keep-alive = 0
lora = ["sql=LORAS/sql", "mail=LORAS/mail"]
[[model]]
name = "fixed"
path = "{BUNDLED}"
ctx-size = 256
lora = ["mail=LORAS/mail"]
[[model]]
name = "large"
path = "{BUNDLED}"
memory = "4T"
[[model]]
name = "long"
path = "{BUNDLED}"
kv-memory = "2G"
[[model]]
name = "broken"
path = "{pathlib.Path(__file__)}"
memory = "300M"
"""
SYSTEM = "You answer in one short sentence, and you name the file and the line of each fault that you find. " * 2


@pytest.fixture(scope="module")
def server(folder):
    path = folder / "models.toml"
    for seed, name in enumerate(("sql", "mail")):
        random_adapter(folder / name, BUNDLED, ("q_proj", "down_proj"), seed=seed, rank=4, scale=0.4)
    path.write_text(TABLE.replace("LORAS", str(folder)).replace("FOLDER", str(folder)))
    (folder / "system.txt").write_text(SYSTEM)
    batches = ("--batch-dir", str(folder / "batches"))
    # Models without `threads` have a thread per core: on one core nobody waits for a thread that does not run.
    given = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(given)})
    os.environ["CKDIST_LORA_DIR"] = str(folder)  # a setting of the server, which its models do not see
    with running("--models", str(path), "--models-max", "2", "--models-memory", "1G", *batches, threads=()) as url:
        os.sched_setaffinity(0, given)
        del os.environ["CKDIST_LORA_DIR"]
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("router")


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=60)


def state(url, name) -> str:
    return httpx.get(f"{url}/v1/models/{name}").json()["status"]["value"]


def engine(name) -> psutil.Process:
    """The process of the model's job."""
    children = psutil.Process().children(recursive=True)
    (found,) = [child for child in children if {"ckdist.cli.child_engine", name} <= set(child.cmdline())]
    return found


def test_eight_clients_of_three_models_get_the_bits_that_each_has_alone(server):
    """Two models fit at once, so models are evicted and loaded while others answer."""
    wants = [{**BODIES[i % 2], "model": ("a", "gpt-4o", "b", "c")[i // 2], "max_tokens": 40} for i in range(8)]
    alone = [streamed(server, body) for body in wants]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: streamed(server, body), wants))
    assert together == alone
    listed = {model["id"]: model for model in httpx.get(f"{server}/models").json()["data"]}
    assert sum(model["status"]["value"] == "loaded" for model in listed.values()) == 2
    assert listed["a"]["aliases"] == ["gpt-4o"] and listed["c"]["max_model_len"] == 256
    assert "completion" in listed["c"]["capabilities"] and 0 < listed["c"]["memory_bytes"] < 1 << 30


def test_a_killed_engine_comes_back_and_its_streams_go_on(server):
    bodies = [{**body, "model": "a", "max_tokens": 400, "ignore_eos": True} for body in BODIES]
    with ThreadPoolExecutor(3) as pool:
        wanted = list(pool.map(lambda body: streamed(server, body), bodies))
        for kills in range(1, 6):  # noqa: B007 - on a busy machine all streams may end before their engine is killed
            process, started = engine("a"), threading.Event()
            answers = [pool.submit(streamed, server, body, started) for body in bodies]
            assert started.wait(30)
            process.kill()
            assert [answer.result() for answer in answers] == wanted
            metrics = httpx.get(f"{server}/metrics").text
            if 'ckdist_resumed_requests{model="a"} 0.0' not in metrics:
                break
            wait_for(lambda: state(server, "a") == "loaded", 30)
    assert f'ckdist_model_restarts{{model="a"}} {kills}.0' in metrics and kills < 6
    assert 'ckdist_resumed_requests{model="a"} 0.0' not in metrics


def test_an_order_loads_and_unloads_and_a_model_with_requests_stays(server):
    httpx.post(f"{server}/models/unload", json={"model": "b"})
    assert post(server, "/models/load", model="b").json() == {"success": True}
    wait_for(lambda: state(server, "b") == "loaded", 30)
    assert post(server, "/models/unload", model="b").json() == {"success": True}
    assert state(server, "b") == "unloaded"
    body = {**BODIES[2], "model": "a", "max_tokens": 400}
    for _ in range(5):  # on a busy machine an answer may end before its engine is suspended
        started = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(streamed, server, body, started)
            assert started.wait(30)
            process = engine("a")
            process.suspend()
            refused = post(server, "/models/unload", model="a")
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        assert len(answer.result()[0]) >= 150
        if refused.status_code != 200:
            break
    assert refused.status_code == 409 and "has 1 request" in refused.text


def test_other_faces_find_models_too(server):
    listed = {model["name"] for model in httpx.get(f"{server}/api/tags").json()["models"]}
    assert {"a", "b", "c"} <= listed and httpx.get(f"{server}/api/version").status_code == 200
    body = {"model": "a:latest", "messages": [{"role": "user", "content": "def"}], "stream": False}
    assert httpx.post(f"{server}/api/chat", json={**body, "options": {"num_predict": 2}}, timeout=60).json()["done"]
    assert "a" in {model["name"] for model in httpx.get(f"{server}/api/ps").json()["models"]}
    first = post(server, "/v1/responses", model="a", input="x", max_output_tokens=2).json()
    again = post(server, "/v1/responses", model="a", input="y", max_output_tokens=2, previous_response_id=first["id"])
    assert again.json()["previous_response_id"] == first["id"]
    assert httpx.get(f"{server}/v1/responses/{first['id']}").json()["id"] == first["id"]


def test_each_model_has_its_prompts_slots_and_trace(server, folder):
    """The prompts of a model's file are computed after each load, before its first request."""
    post(server, "/models/unload", model="c")
    question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}]
    chat = post(server, "/v1/chat/completions", model="c", messages=question, max_tokens=2).json()
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    post(server, "/v1/completions", model="c", prompt="def main(", max_tokens=2, id_slot=0)
    saved = httpx.post(f"{server}/slots/0?action=save&model=c", json={"filename": "x"}).json()
    assert saved["n_saved"] > 0 and list((folder / "slots").glob("*/x"))
    assert httpx.post(f"{server}/slots/0?action=save&model=a", json={"filename": "x"}, timeout=60).status_code == 501
    assert post(server, "/models/unload", model="c").status_code == 200 and (folder / "trace.json").stat().st_size


def ended_batch(url, *names):
    """A batch with a request for each model."""
    bodies = [{"model": name, "prompt": "x", "max_tokens": 2} for name in names]
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    upload = {"file": "\n".join(map(json.dumps, lines)).encode()}
    file = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files=upload).json()
    batch = post(url, "/v1/batches", input_file_id=file["id"], endpoint="/v1/completions").json()
    found = lambda: httpx.get(f"{url}/v1/batches/{batch['id']}").json()
    wait_for(lambda: found()["status"] in ("completed", "failed"), 60)
    return found()


def test_the_lines_of_a_batch_choose_their_models(server):
    batch = ended_batch(server, "a", "b", "gpt-4o", "c")
    text = httpx.get(f"{server}/v1/files/{batch['output_file_id']}/content").text
    answers = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, text.splitlines())}
    assert answers == {"0": "a", "1": "b", "2": "a", "3": "c"}
    refused = ended_batch(server, "a", "gpt-5", "idle:sql")
    assert refused["status"] == "failed" and [error["line"] for error in refused["errors"]["data"]] == [2]
    assert "there is no model 'gpt-5'; this server has a, b, " in refused["errors"]["data"][0]["message"]


def test_an_adapter_is_found_by_its_name_and_its_model_is_loaded(server):
    text = lambda name: post(server, "/v1/completions", **BODIES[0], max_tokens=6, model=name).json()["choices"][0][
        "text"
    ]
    base, sql, mail = text("rests"), text("sql"), text("idle:mail")
    assert len({base, sql, mail}) == 3 and base == text("idle:latest")
    assert sql == text("rests:sql") == text("sql:latest") and mail == text("fixed:mail")
    listed = {entry["id"]: entry for entry in httpx.get(f"{server}/v1/models").json()["data"]}
    wait_for(lambda: state(server, "idle") == "unloaded", 30)
    assert listed["sql"]["parent"] == "idle" and httpx.get(f"{server}/v1/models/sql").json() == listed["sql"]
    twice = post(server, "/v1/completions", prompt="x", model="mail")
    assert twice.status_code == 400 and "2 models have the adapter 'mail': name idle:mail or fixed:mail" in twice.text


def test_an_idle_model_goes(server):
    ordered = post(server, "/api/generate", name="b:latest", keep_alive="0m")
    assert ordered.json()["done_reason"] == "unload" and ordered.json()["model"] == "b"
    wait_for(lambda: state(server, "b") == "unloaded", 30)
    assert post(server, "/api/generate", model="b", keep_alive="soon").status_code == 400
    assert post(server, "/v1/completions", model="idle", prompt="x", max_tokens=2).status_code == 200
    wait_for(lambda: state(server, "idle") == "unloaded", 30)


def test_refusals_name_the_reason_and_leave_the_others_running(server):
    unknown = post(server, "/v1/chat/completions", model="gpt-5", messages=[])
    assert unknown.status_code == 404 and "a, b, broken, c, fixed, idle, large, long, mail, sql" in unknown.text
    assert post(server, "/v1/completions", prompt="x").status_code == 400
    assert post(server, "/v1/completions", prompt="x", model=["a"]).status_code == 400
    assert httpx.post(f"{server}/v1/completions", content=b"[" * 100_000).status_code == 400
    large = post(server, "/v1/completions", model="large", prompt="x")
    assert large.status_code == 503 and "needs 4096.00 GiB, and all models may take 1.00 GiB" in large.text
    long = post(server, "/v1/completions", model="long", prompt="x")
    assert long.status_code == 503 and "'long' needs 2.27 GiB" in long.text and "raise --models-memory" in long.text
    broken = post(server, "/v1/completions", model="broken", prompt="x")
    assert broken.status_code == 503 and 1 < int(broken.headers["retry-after"]) <= 10 and "GGUF" in broken.text
    post(server, "/models/load", model="broken")  # an operator's order does not wait, and fails again
    wait_for(lambda: state(server, "broken") == "unloaded", 30)
    assert int(post(server, "/v1/completions", model="broken", prompt="x").headers["retry-after"]) > 10
    assert post(server, "/v1/completions", model="a", prompt="x", max_tokens=1).status_code == 200
    assert httpx.get(f"{server}/props?model=a").status_code == 200 == httpx.get(f"{server}/health").status_code


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[[model]]\npath = "x"\nctxsize = 1', "model 1 has an unknown setting 'ctxsize', did you mean"),
        ('[[model]]\npath = "x"\nctx_size = "many"', "model 1: ctx_size: 'many' is not a whole number"),
        ('[[model]]\npath = "x"\n[[model]]\npath = "x"', "two models have the name 'x'"),
        ('[[model]]\npath = "x"\n[[model]]\npath = "y"\nlora = ["x=z"]', "an adapter of y have the name 'x'"),
        ('[[model]]\npath = "x"\nhost = "y"', "host is a setting of the whole server"),
        ('[[model]]\npath = "x"\nname = "y"\nalias = "z"', "model 1: name and alias are the same setting"),
        ('[[model]]\npath = "."', "is a folder without a model: it needs config.json or a GGUF file"),
        (
            '[[model]]\npath = "x"\ntrace = "t"\n[[model]]\npath = "y"\ntrace = "./t"',
            "the models 'x' and 'y' have the same trace",
        ),
        ("model = 1", "must have one table"),
        ("", "names no model"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(tmp_path, table, message):
    from ckdist.cli.model_table import read_table
    from ckdist.config.serve_config import ServeConfig
    from ckdist.errors import ConfigError

    path = tmp_path / "models.toml"
    path.write_text(table)
    with pytest.raises(ConfigError, match=message):
        read_table(ServeConfig(models=str(path)))


def test_cores_are_divided_and_the_rest_takes_turns(tmp_path):
    from ckdist.cli.model_table import read_table
    from ckdist.cli.serve_models import hosted_models
    from ckdist.config.serve_config import ServeConfig
    from ckdist.errors import ConfigError

    path = tmp_path / "models.toml"
    tables = [f'[[model]]\nname = "{name}"\npath = "{BUNDLED}"\ntensor_parallel_size = 1\n' for name in "abc"]
    path.write_text(tables[0] + "threads = 1\n" + tables[1] + tables[2])
    own, *shared = hosted_models(read_table(ServeConfig(models=str(path))))
    assert not own.takes_turns and all(model.takes_turns for model in shared)
    assert set(own.cpus).isdisjoint(shared[0].cpus) and shared[0].cpus == shared[1].cpus
    path.write_text(tables[0] + "threads = 4096\n")
    with pytest.raises(ConfigError, match="4096 cores"):
        hosted_models(read_table(ServeConfig(models=str(path))))
