"""llama-server's own API, and what vLLM's and llama-server's clients read in answers: through the real HTTP process."""

import json
import re

import httpx
import pytest

from ckdist.config.serve_config import ServeConfig
from ckdist.serve.addresses import listen
from ckdist.serve.process import HttpProcess
from tests.support.fake_engine import FakeEngine
from tests.support.served import VOCAB, serving, wait_for, write_tokenizer

A, B, C = 66, 67, 68  # token ids of a, b, c


@pytest.fixture(scope="module")
def served():
    with serving(parallel=4, max_queue=8) as pair:
        yield pair


@pytest.fixture
def engine(served):
    yield served[0]
    served[0].delay = 0.0


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served[1].url, timeout=10) as made:
        yield made


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http, path, **body):
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


def test_completion(http):
    answer = post(http, "/completion", prompt="abc", n_predict=4, seed=3, return_tokens=True)
    assert (answer["content"], answer["tokens"], answer["stop"], answer["model"]) == (
        "abca",
        [A, B, C, A],
        True,
        "bytes",
    )
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"], answer["prompt"]) == (
        "limit",
        "",
        False,
        "abc",
    )
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (4, 3, 2)
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["temperature"], settings["top_k"], settings["n_predict"]) == (3, 0.8, 40, 4)
    assert (
        set(answer["timings"]) == TIMINGS
        and answer["timings"]["predicted_n"] == 4
        and answer["timings"]["cache_n"] == 2
    )
    assert post(http, "/completion", prompt="abc", n_predict=1)["tokens"] == []
    assert post(http, "/completion", prompt="日本", n_predict=5)["tokens_predicted"] == 5  # of which three show nothing


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"prompt": "ab<|end|>"}, ("ab", "eos", "")),
        ({"prompt": "abc", "stop": ["ca", "xyz"]}, ("ab", "word", "ca")),
        ({"prompt": "abc", "stop": ["ca"], "include_stop_str_in_output": True}, ("abca", "word", "ca")),
        ({"prompt": "abc", "stop_token_ids": [C]}, ("ab", "word", "c")),
        ({"prompt": "ab<|end|>", "ignore_eos": True, "n_predict": 4}, ("aba", "limit", "")),
        (
            {"prompt": "ab<|end|>", "ignore_eos": True, "n_predict": 4, "skip_special_tokens": False},
            ("ab<|end|>a", "limit", ""),
        ),
        ({"prompt": "abc", "stop": ["b"], "min_tokens": 3, "n_predict": 20}, ("abca", "word", "b")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_how_a_completion_ends(http, body, expected, stream):
    parts = events(http, "/completion", **body) if stream else [post(http, "/completion", **body)]
    text, last = "".join(part["content"] for part in parts), parts[-1]
    assert (text, last["stop_type"], last["stopping_word"]) == expected


def test_completion_stream(http):
    answer = http.post("/completions", json={"prompt": "aé", "n_predict": 4, "stream": True, "n_probs": 1})
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "[DONE]" not in answer.text
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["content"] for part in parts) == "aéa" and parts[-1]["content"] == ""
    assert len([token for part in parts for token in part["tokens"]]) == 4
    assert (
        parts[0]["completion_probabilities"][0]["id"] == A
        and parts[0]["completion_probabilities"][0]["logprob"] == -0.5
    )
    assert {"generation_settings", "timings", "stop_type", "tokens_predicted"} <= set(parts[-1])
    assert "timings" not in parts[0]
    assert "timings" in events(http, "/completion", prompt="a", n_predict=2, timings_per_token=True)[0]


def test_several_prompts_are_a_list(http):
    answers = post(http, "/completion", prompt=["ab", [C], [A, "b", C]], n_predict=2)
    assert [(answer["index"], answer["content"], answer["prompt"]) for answer in answers] == [
        (0, "ab", "ab"),
        (1, "cc", "c"),
        (2, "ab", "abc"),
    ]


def test_response_fields(http):
    answer = post(
        http,
        "/completion",
        prompt="ab",
        n_predict=2,
        response_fields=["content", "generation_settings/n_predict", "nothing/here"],
    )
    assert answer == {"content": "ab", "n_predict": 2}


def test_props_slots_and_adapters(served, http, engine):
    props = http.get("/props").json()
    assert (props["total_slots"], props["model_alias"], props["bos_token"], props["eos_token"]) == (
        4,
        "bytes",
        "<|begin|>",
        "<|end|>",
    )
    assert "add_generation_prompt" in props["chat_template"]
    assert (
        props["default_generation_settings"]["n_ctx"] == 256
        and props["default_generation_settings"]["params"]["temperature"] == 0.8
    )
    assert [slot["is_processing"] for slot in http.get("/slots").json()] == [False] * 4
    engine.delay = 0.05
    with http.stream("POST", "/completion", json={"prompt": "ab", "n_predict": 200, "stream": True, "n": 4}) as stream:
        lines = stream.iter_lines()  # held, since it ends the request when it is dropped
        next(lines)
        assert [slot["is_processing"] for slot in httpx.get(f"{served[1].url}/slots").json()] == [True] * 4
        assert httpx.get(f"{served[1].url}/slots?fail_on_no_slot=1").status_code == 503
    assert http.get("/lora-adapters").json() == []
    assert http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]).json()["error"]["param"] == "scale"


def test_the_adapter_that_was_loaded_is_listed(tmp_path):
    folder = write_tokenizer(tmp_path)
    with FakeEngine(f"ipc://{tmp_path}/engine", VOCAB) as engine:
        http = HttpProcess.start(
            ServeConfig(port=0, lora="adapters/mine/"), engine.endpoint, str(folder), "x", listen("127.0.0.1", 0)
        )
        try:
            assert httpx.get(f"{http.url}/lora-adapters").json() == [{"id": 0, "path": "mine", "scale": 1.0}]
        finally:
            http.stop()


def test_tokenizer_info_for_clients_without_a_tokenizer(http):
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<|end|>", "<|begin|>", 256)
    assert "add_generation_prompt" in info["chat_template"]


def test_apply_template(http):
    messages = [{"role": "user", "content": "ab"}]
    assert post(http, "/apply-template", messages=messages) == {"prompt": "[user]ab[assistant]"}


CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}


@pytest.mark.parametrize(
    "path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "ab", "max_tokens": 3})]
)
def test_answers_have_timings_and_a_fingerprint(http, engine, path, body):
    engine.delay = 0.01
    whole = post(http, path, **body)
    assert set(whole["timings"]) == TIMINGS and whole["timings"]["predicted_n"] == 3
    chunks = events(http, path, **body)
    assert "timings" in chunks[-1] and not any("timings" in chunk or "usage" in chunk for chunk in chunks[:-1])
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    assert whole["system_fingerprint"].startswith("ckdist-")
    with_usage = events(http, path, **body, stream_options={"include_usage": True})
    assert (
        with_usage[-1]["choices"] == []
        and set(with_usage[-1]["timings"]) == TIMINGS
        and "timings" not in with_usage[-2]
    )
    engine.delay = 0.2  # tokens that wait for one another come in one chunk
    always = events(
        http,
        path,
        **body,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        timings_per_token=True,
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert (
        counts == sorted(counts)
        and counts[-1] == 3
        and len(set(counts)) > 1
        and all("timings" in chunk for chunk in always)
    )


def test_vllms_stop_reason_and_token_ids(http):
    choice = post(http, "/v1/completions", prompt="abc", stop=["c"], return_token_ids=True)["choices"][0]
    assert (choice["stop_reason"], choice["token_ids"], choice["prompt_token_ids"]) == ("c", [A, B, C], [A, B, C])
    assert post(http, "/v1/completions", prompt="abc", stop_token_ids=[C])["choices"][0]["stop_reason"] == C
    assert post(http, "/v1/completions", prompt="a<|end|>")["choices"][0]["stop_reason"] is None
    chunks = events(http, "/v1/chat/completions", **CHAT, return_token_ids=True)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert len(ids) == 3 and chunks[0]["prompt_token_ids"][:3] == ids


NAMES = [
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/models"),
    ("GET", "/models/bytes"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("GET", "/lora-adapters"),
]
BODIES = {
    "/chat/completions": CHAT,
    "/completion": {"prompt": "ab", "n_predict": 1},
    "/tokenize": {"content": "ab"},
    "/detokenize": {"tokens": [A]},
    "/apply-template": CHAT,
}


@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize("begin", ["", "/v1"])
def test_paths_have_all_their_names(http, begin, end):
    for method, name in NAMES:
        assert http.request(method, begin + name + end).status_code == 200, name
        if method == "GET":
            head = http.head(begin + name + end)
            assert head.status_code == 200 and head.content == b"", name
    for name, body in BODIES.items():
        assert http.post(begin + name + end, json=body).status_code == 200, name
    completion = http.post(f"{begin}/completions{end}", json={"prompt": "ab", "max_tokens": 1}).json()
    assert ("choices" in completion) == (begin == "/v1")  # llama-server's own without the version, OpenAI's with it


@pytest.mark.parametrize("path", ["/pooling", "/v1/uploads", "/v1/assistants"])
def test_paths_of_other_servers_are_refused_in_words(http, path):
    for answer in (http.post(path, json={"input": "a"}), http.get(path)):
        error = answer.json()["error"]
        assert (
            answer.status_code == 404
            and error["code"] == "unsupported_endpoint"
            and "not supported by this server" in error["message"]
        )


def test_unknown_paths_and_methods(http):
    assert http.get("/nowhere").json()["error"]["code"] == "unknown_url"
    answer = http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_metrics_count_paths_under_one_name(http):
    http.post("/tokenize/", json={"content": "a"})
    http.get("/v1/models/bytes")
    http.get("/no/such/path")
    text = http.get("/v1/metrics/").text
    assert 'ckdist_requests_total{path="/tokenize",status="200"}' in text and 'path="/v1/models/{name:path}"' in text
    assert "/tokenize/" not in text and "no/such" not in text and 'path="other"' in text


def test_unknown_fields_are_logged_once(capfd):
    with serving() as (_, http):
        for _ in range(3):
            assert (
                httpx.post(f"{http.url}/v1/completions", json={"prompt": "a", "zeal\n": 1, "max_tokens": 1}).status_code
                == 200
            )
    assert capfd.readouterr().err.count("zeal\\n") == 1


def test_strict_fields():
    with serving(strict_fields=True) as (_, http):
        answer = httpx.post(f"{http.url}/v1/completions", json={"prompt": "a", "zeal": 1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "zeal"


def test_dashboards_of_vllm_and_llama_server():
    from prometheus_client.parser import text_string_to_metric_families

    with serving() as (engine, http):
        wait_for(lambda: "blocks_used" in engine.stats)
        httpx.post(f"{http.url}/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        httpx.post(f"{http.url}/v1/completions", json={"prompt": "a<|end|>", "max_tokens": 4})
        wait_for(lambda: re.search(r"(?m)^vllm:num_requests_running\S* 0", httpx.get(f"{http.url}/metrics").text))
        families = {
            family.name: family for family in text_string_to_metric_families(httpx.get(f"{http.url}/metrics").text)
        }
        values = {
            (s.name, s.labels.get("finished_reason")): s.value for family in families.values() for s in family.samples
        }
        labels = families["vllm:prompt_tokens"].samples[0].labels
    assert labels == {"model_name": "bytes", "engine": "0"}
    for name, value in {
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 5,
        "vllm:prefix_cache_queries_total": 5,
        "vllm:prefix_cache_hits_total": 4,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:time_per_output_token_seconds_count": 3,
        "vllm:inter_token_latency_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 5,
        "vllm:num_preemptions_total": 1,
        "llamacpp:tokens_predicted_total": 5,
        "llamacpp:prompt_tokens_total": 1,
        "llamacpp:requests_processing": 0,
        "llamacpp:requests_deferred": 3,
        "llamacpp:kv_cache_usage_ratio": 0.25,
    }.items():
        assert values[name, None] == value, name
    assert [values["vllm:request_success_total", reason] for reason in ("stop", "length", "abort")] == [1, 1, 0]
    types = {
        name: families[name].type
        for name in ("vllm:prompt_tokens", "vllm:time_to_first_token_seconds", "llamacpp:prompt_tokens_seconds")
    }
    assert list(types.values()) == ["counter", "histogram", "gauge"]
    assert values["llamacpp:predicted_tokens_seconds", None] > 0
