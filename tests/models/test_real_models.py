"""Two published models on 1, 2 and 3 ranks: ids as llama.cpp's, log-probabilities as transformers', facts as text.

The golden files are tests/golden/real (tests/golden/make_real_golden.py). The KL divergence is taken over the 64 most
likely ids and one bucket for the rest, which is a lower bound. Measured on 1, 2 and 3 ranks it was below the whole
one by 6.6e-4, 7.4e-4 and 6.6e-4 of 4.5e-3, 5.1e-3 and 4.4e-3 (smollm2), and by 3.0e-4 of 2.2e-3, 2.2e-3 and 2.1e-3
(gemma3-270m).

CI fails where a model cannot be fetched; elsewhere its tests are skipped, and the last lines of the run say so. Terms
are accepted by CI alone, whose owner has; a user accepts them with `ckdist pull`.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time

import httpx
import numpy as np
import pytest

from ckdist.errors import CkdistError
from ckdist.hub.catalogue import CATALOGUE
from ckdist.hub.fetch import fetch
from ckdist.hub.store import Store
from tests.support.launcher import mpirun, one_host, run_ranks
from tests.support.paths import GOLDEN as GOLDEN_FILES

GOLDEN = GOLDEN_FILES / "real"
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
RANKS = {"smollm2": (1, 2), "gemma3-270m": (3,)}
SCORED = 512  # golden ids: all that have golden log-probabilities
QUESTION = "What is the capital of Japan?"
FACTS = {
    "smollm2": {
        "The capital of France is": "Paris",
        "The capital of Japan is": "Tokyo",
        "The opposite of hot is": "cold",
        "1, 2, 3, 4,": "5, 6, 7",
    },
    "gemma3-270m": {
        "The capital of Japan is": "Tokyo",
        "The opposite of hot is": "cold",
        "The chemical symbol of water is": "H2O",
        "1, 2, 3, 4,": "5, 6, 7",
    },
}
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
CHAT_PROMPTS = {
    "smollm2": CHATML.format(QUESTION),
    "gemma3-270m": None,
}  # the second is a base model, without a template
problems: dict[str, str] = {}  # by model, of those that a fetch was tried for already


def need(name: str) -> None:
    """Fetches a model, or skips the test, or fails it in CI."""
    model, store = CATALOGUE[name], Store()
    if name not in problems and not store.has(model):
        try:
            fetch(model, store, accept_license=IN_CI)
        except CkdistError as error:
            problems[name] = str(error)
    if name in problems:
        (pytest.fail if IN_CI else pytest.skip)(f"{name} is not here: {problems[name]}")


@pytest.mark.parametrize("name, ranks", [(name, ranks) for name in CATALOGUE for ranks in RANKS[name]])
def test_published_model(name, ranks):
    need(name)
    golden = GOLDEN / f"{name}.npz"
    done = run_ranks(
        ranks,
        "tests/support/programs/real_model.py",
        name,
        str(GOLDEN / f"{name}.tokens.json"),
        str(golden),
        str(SCORED),
        QUESTION,
        *FACTS[name],
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["texts"] > 60 and result["wrong"] == []
    expected = np.exp(-np.load(golden)["next_logprob"][: SCORED - 1].astype(np.float64).mean())
    assert abs(result["perplexity"] / expected - 1) < 0.005, (result, expected)
    assert result["kl"] < 5e-3, result
    assert result["chat_prompt"] == CHAT_PROMPTS[name]
    for answer, (prompt, fact) in zip(result["answers"], FACTS[name].items(), strict=False):
        assert answer.strip().startswith(fact), (prompt, answer)
    if result["chat_prompt"]:
        assert "Tokyo" in result["answers"][-1]


def test_the_line_that_serve_prints_asks_a_question():
    """Two ranks serve the model by its name; the request of the curl line gets what a person would call an answer."""
    need("smollm2")
    words = ["-m", "ckdist.cli.main", "serve", "-m", "smollm2", "--port", "0", "-t", "1"]
    server = subprocess.Popen(
        [*mpirun(2), *words],
        env=one_host(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(100, os.killpg, (server.pid, signal.SIGKILL))
    limit.start()
    try:
        line = next(line for line in server.stdout if "curl http" in line)
        url, body = re.search(r"curl (\S+/v1/chat/completions) .* -d '(.*)'$", line).groups()
        while httpx.get(url.replace("/v1/chat/completions", "/health")).status_code != 200:
            time.sleep(0.1)  # the timer ends the server, and so this
        answer = httpx.post(url, json=json.loads(body), timeout=60).json()
        assert answer["model"] == "smollm2"
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop" and "scatter" in choice["message"]["content"], answer
    finally:
        limit.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
