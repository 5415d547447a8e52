"""`from ckdist import LLM`: generation and logits without a server, and models packed as they are loaded."""

import json
import pathlib

import numpy as np
import pytest

from ckdist import LLM, SamplingParams
from ckdist.engine.load_model import BUNDLED
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.launcher import run_ranks
from tests.support.paths import GOLDEN

GREEDY = SamplingParams(max_tokens=16, temperature=0)


@pytest.fixture(scope="module")
def llm():
    with LLM(threads=2, ctx_size=512) as llm:
        yield llm


def test_prompts_share_batches_and_stay_themselves(llm):
    prompts = ["def main(", "import os\n", "class Node:\n    def "]
    together = llm.generate(prompts, GREEDY)
    assert [c.text for c in together] == [llm.generate(p, GREEDY)[0].text for p in prompts]
    assert all(len(c.token_ids) == 16 or c.finish_reason == "stop" for c in together)


def test_generated_tokens_are_the_logits_argmax(llm):
    prompt = llm.tokenizer.encode("import os\n")
    (completion,) = llm.generate([prompt], GREEDY)
    logits = llm.logits(prompt + completion.token_ids)
    assert logits.shape == (len(prompt) + len(completion.token_ids), llm.engine.vocab_size)
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == completion.token_ids


def test_a_gguf_with_its_own_vocabulary():
    with LLM(GOLDEN / "gguf" / "Q8_0.gguf", threads=1, ubatch_size=32) as llm:
        ids = np.load(GOLDEN / "gguf" / "ids.npy").tolist()
        assert llm.logits(ids).shape == (len(ids), 512)
        assert len(llm.generate([ids], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].token_ids) == 4


@pytest.mark.parametrize("quantize, rms", [("q8_0", 0.05), ("q4_k", 0.4)])
def test_quantised_as_it_is_loaded(quantize, rms, llm):
    """Against the unquantised model's logits, whose spread is several units; half the bytes or less."""
    ids = llm.tokenizer.encode("import os\nimport sys\n\n\ndef main(argv):\n    return len(argv)\n")
    exact = llm.logits(ids)
    with LLM(threads=1, ctx_size=512, quantize=quantize) as packed:
        difference = packed.logits(ids) - exact
        assert np.sqrt(np.mean(difference**2)) < rms < exact.std()


def test_perplexity_is_the_same_over_ranks(tmp_path):
    text = tmp_path / "text.py"
    text.write_text((pathlib.Path(json.__file__).parent / "decoder.py").read_text()[:6000])
    flags = ["-f", str(text), "--json", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-c", "256"]
    results = []
    for ranks in (1, 2):
        done = run_ranks(ranks, "-m", "ckdist.cli.main", "perplexity", *flags)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert results[0]["scored"] == results[1]["scored"] == results[0]["tokens"] - 1
    assert results[0]["perplexity"] == pytest.approx(results[1]["perplexity"], rel=1e-3)
    assert 1 < results[0]["perplexity"] < 200


def test_the_bundled_model_is_what_its_card_says():
    checkpoint = open_checkpoint(BUNDLED)
    parameters = sum(np.prod(t.shape) for name, t in checkpoint.tensors.items() if name != "lm_head.weight")
    assert 10e6 < parameters < 15e6
    assert sum(p.stat().st_size for p in BUNDLED.iterdir()) < 24 << 20
    assert (BUNDLED / "README.md").exists()
