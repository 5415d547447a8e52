"""Tiny encoder-decoders from a folder to a text: the server's paths and `ckdist generate`."""

import json
import subprocess
import sys

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.launcher import environment
from tests.support.paths import GOLDEN, ROOT
from tests.support.running import running
from tests.support.translators import write_translator

FOLDER = GOLDEN / "encoder_decoders"
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_a_folder_is_served(tmp_path, name):
    """The golden texts; those of Marian, though its padding has by far the largest logit."""
    changed = {}
    if name == "marian":
        bias = load_file(FOLDER / name / "model.safetensors")["final_logits_bias"].copy()
        bias[..., 1] += 100.0  # of the padding
        changed["final_logits_bias"] = bias
    tokenizer = write_translator(tmp_path / name, name, changed)
    sources, greedy = np.load(FOLDER / name / "sources.npz"), np.load(FOLDER / name / "greedy.npy")
    expected = [tokenizer.decode(row.tolist()) for row in greedy]
    flags = ("-m", str(tmp_path / name), "-ctk", "f32", "-ctv", "f32")
    with running(*flags) as url, httpx.Client(base_url=url, timeout=60) as http:
        prompts = [sources[str(i)].tolist() for i in range(3)]
        given = http.post("/v1/completions", json={"prompt": prompts, **GREEDY}).json()
        assert [choice["text"].strip() for choice in given["choices"]] == [text.strip() for text in expected]
        assert given["usage"]["prompt_tokens"] == sum(map(len, prompts))
        text = _check_paths(http, given["choices"][0]["text"], prompts[0])
    if name == "t5":
        _check_generate(tmp_path / name, text)


def _check_paths(http: httpx.Client, text: str, source: list[int]) -> str:
    """Streams, choices, stops, vectors and what is refused; the text that follows "a small text"."""
    body = {"prompt": source, **GREEDY}
    lines = http.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
    several = http.post("/v1/completions", json={**body, "n": 3, "logprobs": 2}).json()["choices"]
    assert [choice["text"] for choice in several] == [text] * 3
    assert [len(choice["logprobs"]["tokens"]) for choice in several] == [24] * 3
    stop = text.strip()[1]
    assert http.post("/completion", json={**body, "n_predict": 24, "stop": [stop]}).json()["content"] in text
    vector = http.post("/v1/embeddings", json={"input": "a small text"}).json()["data"][0]["embedding"]
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, wrong in (("/v1/chat/completions", chat), ("/v1/completions", {**body, "echo": True, "logprobs": 1})):
        assert http.post(path, json=wrong).status_code == 400
    return http.post("/v1/completions", json={**body, "prompt": "a small text"}).json()["choices"][0]["text"]


def _check_generate(folder, text: str) -> None:
    """The command writes what the server does."""
    flags = ["-n", "24", "--temp", "0", "--ignore-eos", "--json", "-ctk", "f32", "-ctv", "f32", "-t", "1", "-tp", "1"]
    words = [sys.executable, "-m", "ckdist.cli.main", "generate", "-m", str(folder), "-p", "a small text", *flags]
    done = subprocess.run(words, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == text
