"""Encoder-decoders against golden texts and logits by transformers."""

import numpy as np
import pytest

from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from tests.support.paths import GOLDEN
from tests.support.taken_in_turns import skip_most

MODELS = sorted(path.parent for path in GOLDEN.glob("encoder_decoders/*/config.json"))
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def on_rank_0(world, model, check, **settings) -> None:
    """Runs `check(engine)` on rank 0 while the other ranks work for it."""
    fields = {"cache_type_k": "f32", "cache_type_v": "f32", "threads": 1, "prefill": "token", **settings}
    loaded = load_model(EngineConfig(model=str(model), **fields), world)
    try:
        if world.rank == 0:
            tokens = loaded.spec.start_tokens
            check(Engine(loaded.executable, Sampler(loaded.spec.vocab_size), start_tokens=tokens))
        else:
            loaded.executable.work()
    finally:
        loaded.close()


def texts(engine: Engine, sources, aborted=(), params: SamplingParams = GREEDY) -> list[list[int]]:
    """The greedy texts of sources that are in the queue at once; those of `aborted` end behind five tokens."""
    found: dict[int, list[int]] = {index: [] for index in range(len(sources))}
    for index, source in enumerate(sources):
        engine.add(index, source, params)
    while engine.has_work:
        for output in engine.step():
            found[output.id] += output.tokens
            assert output.error is None and output.prompt_tokens == len(sources[output.id])
            if output.id in aborted and len(found[output.id]) >= 5 and output.finish_reason is None:
                engine.abort(output.id)
    return [found[index] for index in range(len(sources))]


def golden(folder) -> tuple[list[np.ndarray], list[list[int]]]:
    sources = np.load(folder / "sources.npz")
    return [sources[str(i)] for i in range(len(sources.files))], np.load(folder / "greedy.npy").tolist()


class Recorder:
    """A sampler that keeps the logits that it is given, of one sequence."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.rows = sampler, []

    def sample(self, logits, rows):
        self.rows.append(logits[0].copy())
        return self.sampler.sample(logits, rows)


def test_there_are_models():
    assert [folder.name for folder in MODELS] == ["bart", "marian", "t5", "t5_gated"]


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_golden_texts_and_logits(world, folder):
    """Alone, together with other sources, and again after preemption and aborts."""
    skip_most(world, MODELS.index(folder))
    sources, greedy = golden(folder)
    hidden, logits = np.load(folder / "hidden.npy"), np.load(folder / "logits.npy")

    def check(engine):
        engine.outputs.sampler = recorder = Recorder(engine.outputs.sampler)
        assert texts(engine, sources[:1]) == greedy[:1]
        assert np.abs(np.array(recorder.rows) - logits).max() < 1e-4 * np.abs(logits).max()
        engine.outputs.sampler = recorder.sampler
        assert texts(engine, [*sources, sources[0]]) == [*greedy, greedy[0]]
        assert [text[:5] for text in texts(engine, sources[::-1], aborted=(0, 2))] == [row[:5] for row in greedy[::-1]]
        engine.embed("mean", sources[0], "mean")
        (output,) = [output for _ in range(9) if engine.has_work for output in engine.step()]
        assert np.abs(output.embedding - hidden.mean(axis=0)).max() < 1e-4 * np.abs(hidden).max()
        assert engine.pool.available == engine.pool.num_blocks and not engine.pool.cached
        with pytest.raises(RequestError, match="an encoder reads the prompt"):
            engine.add("scored", sources[0], SamplingParams(max_tokens=1, prompt_logprobs=1))

    on_rank_0(world, folder, check)


CACHES = ("f16", "i16", "q8_0")


@pytest.mark.parametrize("cache", CACHES)
def test_other_caches_and_preemption(world, cache):
    """With few blocks left sequences give theirs back, and are read and computed again."""
    skip_most(world, CACHES.index(cache))
    sources, _ = golden(GOLDEN / "encoder_decoders" / "t5")
    many = [sources[1 + i % 2] for i in range(5)]

    def check(engine):
        alone = [texts(engine, [source], params=LONG)[0] for source in sources]
        engine.pool.allocate(engine.pool.num_blocks - 6)
        assert texts(engine, many, params=LONG) == [alone[1 + i % 2] for i in range(5)]
        assert engine.scheduler.preemptions > 0

    on_rank_0(world, GOLDEN / "encoder_decoders" / "t5", check, cache_type_k=cache, cache_type_v=cache, ctx_size=64)
