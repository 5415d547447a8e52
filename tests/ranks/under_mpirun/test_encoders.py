"""Encoders against golden hidden states by transformers, and hidden states of decoders against their logits."""

import sys

import numpy as np
import pytest

from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from tests.support.paths import GOLDEN
from tests.support.taken_in_turns import skip_most

ENCODERS = sorted(path.parent for path in GOLDEN.glob("encoders/*/hidden.npy"))
SCORERS = sorted(path.parent for path in GOLDEN.glob("encoders/*/scores.npy"))
FIRST_TEXT, PAIRS = 24, (64, 39)  # as tests/golden/make_encoder_golden.py has them


def on_rank_0(world, model, check, **settings) -> None:
    """Runs `check(engine)` on rank 0 while the other ranks work for it."""
    fields = {"cache_type_k": "f32", "cache_type_v": "f32", "threads": 1, "prefill": "token", **settings}
    loaded = load_model(EngineConfig(model=str(model), **fields), world, embeddings=True)
    try:
        if world.rank == 0:
            check(Engine(loaded.executable, Sampler(loaded.spec.vocab_size)))
        else:
            loaded.executable.work()
    finally:
        loaded.close()


def embed(engine: Engine, prompts, pooling: str, first_text: int = 0) -> list[np.ndarray]:
    """The vectors of prompts that are in the queue at once."""
    for index, prompt in enumerate(prompts):
        engine.embed(index, prompt, pooling, first_text)
    found = {}
    while engine.has_work:
        found.update({output.id: output.embedding for output in engine.step()})
    return [found[index] for index in range(len(prompts))]


def test_there_are_encoders():
    assert [folder.name for folder in ENCODERS] == ["bert", "embedding_gemma", "modernbert", "nomic_bert", "roberta"]
    assert [folder.name for folder in SCORERS] == ["bert_scorer", "modernbert_scorer", "roberta_scorer"]


@pytest.mark.parametrize("folder", SCORERS, ids=lambda folder: folder.name)
def test_every_cross_encoder(world, folder):
    """Scores of pairs, alone and together; BERT's know the second text."""
    skip_most(world, SCORERS.index(folder))
    ids, expected = np.load(folder / "ids.npy"), np.load(folder / "scores.npy")

    def check(engine):
        scored = [embed(engine, [ids[:end]], "cls", FIRST_TEXT)[0] for end in PAIRS]
        assert np.abs(np.concatenate(scored) - expected).max() < 2e-5
        together = embed(engine, [ids[:end] for end in PAIRS], "cls", FIRST_TEXT)
        assert np.array_equal(together, scored), "another sequence in the step changed bits"
        knows = not np.array_equal(embed(engine, [ids], "cls"), scored[:1])
        assert knows == (folder.name == "bert_scorer")

    on_rank_0(world, folder, check)


@pytest.mark.parametrize("folder", ENCODERS, ids=lambda folder: folder.name)
def test_every_encoder(world, folder):
    skip_most(world, ENCODERS.index(folder))
    ids, expected = np.load(folder / "ids.npy"), np.load(folder / "hidden.npy")

    def check(engine):
        tolerance = 2e-5 * np.abs(expected).max()
        (mean,), (first,), (last,) = (embed(engine, [ids], pooling) for pooling in ("mean", "cls", "last"))
        assert np.abs(mean - expected.mean(axis=0)).max() < tolerance
        assert np.abs(first - expected[0]).max() < tolerance and np.abs(last - expected[-1]).max() < tolerance
        engine.executable.prefill_from = sys.maxsize
        assert np.array_equal(embed(engine, [ids], "mean")[0], mean), "tensor-parallel gave other bits"
        together = embed(engine, [ids[:9], ids, ids[:1], ids[5:40]], "mean")
        assert np.array_equal(together[1], mean), "other sequences in the step changed bits"

    on_rank_0(world, folder, check)


@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen35moe"])
def test_hidden_states_of_a_decoder(world, family):
    """They give the golden logits, whatever the chunks, the pooling and what else runs; a prefix is not skipped where
    all tokens count.
    """
    folder = GOLDEN / family
    ids, expected = np.load(folder / "ids.npy"), np.load(folder / "logits.npy")
    stored = open_checkpoint(folder)
    head = tensor(stored, "lm_head.weight")

    def check(engine):
        each = np.array([embed(engine, [ids[: n + 1]], "last")[0] for n in range(len(ids))])  # (tokens, hidden)
        logits, spec = each @ head.T * stored.spec.logit_scale, stored.spec
        if spec.logit_soft_cap:
            logits = spec.logit_soft_cap * np.tanh(logits / spec.logit_soft_cap)
        assert np.abs(logits - expected).max() < 2e-5 * max(1.0, np.abs(expected).max())
        cached = engine.stats()["cached_tokens_total"]
        (mean,) = embed(engine, [ids], "mean")
        assert cached > 0 and engine.stats()["cached_tokens_total"] == cached
        assert np.abs(mean - each.mean(axis=0)).max() < 1e-6 * np.abs(each).max()
        alone = text(engine, ids[:8])
        for index, prompt in enumerate((ids, ids[:5], ids[3:60])):
            engine.embed(index, prompt, "mean")
        assert text(engine, ids[:8]) == alone, "embeddings beside it changed a text"

    on_rank_0(world, folder, check, ubatch_size=24)


def text(engine: Engine, prompt) -> list[int]:
    """A greedy continuation, among whatever else is queued."""
    engine.add("text", prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() if output.id == "text" for token in output.tokens]
    return tokens


def tensor(stored: Checkpoint, name: str) -> np.ndarray:
    """A float32 matrix of a checkpoint."""
    source = stored.tensors[name]
    with open(source.file, "rb") as file:
        file.seek(source.offset)
        return np.frombuffer(file.read(source.nbytes), np.float32).reshape(source.shape)
