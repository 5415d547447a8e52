"""Embeddings over a fake rank 0, by the `openai` client and by plain requests."""

import base64
import string

import httpx
import numpy as np
import pytest

from tests.support.clients import openai
from tests.support.fake_engine import vector_of
from tests.support.served import serving, wait_for


@pytest.fixture(scope="module")
def served():
    with serving(parallel=2, max_queue=4, strict_fields=True) as pair:
        yield pair


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served[1].url, timeout=20) as made:
        yield made


def expected(tokens, dimensions: int = 8) -> np.ndarray:
    vector = vector_of(tokens)[:dimensions]
    return vector / np.linalg.norm(vector)


def tokens_of(http, text: str) -> list[int]:
    return http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]


def test_the_client(served, http):
    client = openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0)
    texts = [f"text {i}" for i in range(40)]  # more than may wait at once
    made = client.embeddings.create(model="m", input=texts)
    assert [item.index for item in made.data] == list(range(40)) and made.usage.prompt_tokens == sum(
        len(tokens_of(http, text)) for text in texts
    )
    for text, item in zip(texts, made.data, strict=True):
        np.testing.assert_allclose(item.embedding, expected(tokens_of(http, text)), rtol=1e-6)
    plain = client.embeddings.create(model="m", input=[5, 6, 6], encoding_format="float", dimensions=7)
    np.testing.assert_allclose(plain.data[0].embedding, expected([5, 6, 6], 7), rtol=1e-6)


def test_shapes(http):
    lists = http.post("/v1/embeddings", json={"input": [[5], [6, 7]], "encoding_format": "base64", "user": "u"}).json()
    assert lists["object"] == "list" and lists["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    decoded = np.frombuffer(base64.b64decode(lists["data"][1]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, expected([6, 7]), rtol=1e-6)
    own = http.post("/embedding", json={"content": [[5, 5]], "embd_normalize": -1}).json()
    assert own == [{"index": 0, "embedding": [vector_of([5, 5]).tolist()]}]
    ranked = http.post(
        "/rerank", json={"query": "aaa", "documents": ["bcd", "aaa", {"text": "aab"}], "top_n": 2}
    ).json()
    assert [result["index"] for result in ranked["results"]] == [1, 2]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    shown = http.post("/v1/rerank", json={"query": "a", "documents": ["b"], "return_documents": True}).json()
    assert shown["results"][0]["document"] == {"text": "b"}
    pairs = http.post("/score", json={"text_1": "abc", "text_2": ["abc", "xyz"]}).json()["data"]
    assert pairs[0]["score"] == pytest.approx(1, abs=1e-6) and pairs[1]["score"] < 0.99
    cut = http.post("/v1/embeddings", json={"input": "x" * 5000, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("/v1/embeddings", {}, "input is needed"),
        ("/v1/embeddings", {"input": []}, "input is needed"),
        ("/v1/embeddings", {"input": [1, 2.5]}, "input has a token"),
        ("/v1/embeddings", {"input": ["a", 5.5]}, "must be a string or a list of token ids"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "must be float or base64"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "more than the 8 of this model"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "more than 2048"),
        ("/v1/embeddings", {"input": "a" * 300}, "exceeds the available context size"),
        ("/v1/embeddings", {"input": "a", "nonsense": 1}, "unknown field"),
        ("/v1/rerank", {"documents": ["a"]}, "query is needed"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents must hold strings"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "give one, or as many"),
    ],
)
def test_wrong_requests(http, path, body, words):
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_vector_for_each_token():
    """With --pooling none /embedding gives them as they are; other paths have no use for them."""
    with serving(parallel=2, max_queue=4) as (engine, served), httpx.Client(base_url=served.url, timeout=20) as http:
        engine.model["pooling"] = "none"
        wait_for(lambda: http.post("/v1/embeddings", json={"input": "a"}).status_code == 400)
        found = http.post("/embedding", json={"content": [[5, 6], [5]]}).json()
        assert [item["index"] for item in found] == [0, 1]
        both, one = (np.array(item["embedding"], np.float32) for item in found)
        np.testing.assert_array_equal(both, vector_of([5, 6]).reshape(2, 4))
        np.testing.assert_array_equal(one, vector_of([5])[None])
        refused = http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).json()["error"]["message"]
        assert "--pooling none" in refused


def test_a_cross_encoder():
    """Pairs go to the engine as one prompt each; the score is what comes back, or its sigmoid."""
    with serving(parallel=2, max_queue=4) as (engine, served), httpx.Client(base_url=served.url, timeout=20) as http:
        engine.model["scores"] = "sigmoid"
        wait_for(lambda: http.post("/v1/embeddings", json={"input": "a"}).status_code == 400)
        engine.submitted.clear()
        counted = next(c for c in string.ascii_letters if vector_of(tokens_of(http, f"{c} {c}"))[0] == 2)
        body = {"query": "ab", "documents": [f"{counted} {counted}", "", counted], "top_n": 2}
        results = http.post("/v1/rerank", json=body).json()["results"]
        query, documents = tokens_of(http, "ab"), [tokens_of(http, text) for text in body["documents"]]
        sent = sorted((message["prompt"], message["first_text"]) for message in engine.submitted)
        assert sent == sorted(([*query, *document], len(query)) for document in documents)
        logits = [vector_of([*query, *document])[0] for document in documents]
        best = sorted((1 / (1 + np.exp(-x)) for x in logits), reverse=True)[:2]
        assert [result["relevance_score"] for result in results] == pytest.approx(best)
        assert logits[0] == logits[2] + 1 and logits[2] == logits[1] + 1
        raw = http.post(
            "/score", json={"text_1": "ab", "text_2": body["documents"][::2], "use_activation": False}
        ).json()
        assert [item["score"] for item in raw["data"]] == pytest.approx([logits[0], logits[2]])
        long = http.post("/v1/rerank", json={"query": "a" * 300, "documents": ["b"]})
        assert long.status_code == 400 and "exceeds the available context size" in long.json()["error"]["message"]


def test_a_decoder_that_ranks():
    """The question of the model's template; control tokens in the texts are plain text."""
    with serving(parallel=2, max_queue=4) as (engine, served), httpx.Client(base_url=served.url, timeout=20) as http:
        engine.model |= {"scores": "sigmoid", "pooling": "rank", "rank_template": "ask {query} of {document}?"}
        wait_for(lambda: http.post("/v1/embeddings", json={"input": "a"}).status_code == 400)
        engine.submitted.clear()
        counted = next(c for c in string.ascii_letters if vector_of(tokens_of(http, f"{c} {c}"))[0] == 2)
        body = {"query": "a{document}", "documents": ["", f"{counted} {counted}"]}
        ranked = http.post("/v1/rerank", json=body).json()["results"]
        prompts = [tokens_of(http, f"ask a{{document}} of {text}?") for text in body["documents"][::-1]]
        assert sorted(message["prompt"] for message in engine.submitted) == sorted(prompts)
        logits = [vector_of(prompt)[0] for prompt in prompts]
        expected = [1 / (1 + np.exp(-logit)) for logit in logits]
        assert [result["relevance_score"] for result in ranked] == pytest.approx(expected)
        assert [result["index"] for result in ranked] == [1, 0] and expected[0] > expected[1]
        body = {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9}
        assert "truncate_prompt_tokens is not possible" in http.post("/v1/rerank", json=body).text
