"""Tokens of real models that are rolled back and decoded again: the logits have the same bits."""

from collections import defaultdict

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from tests.support.paths import GOLDEN


@pytest.mark.parametrize("model", ["llama3", "gemma3", "deepseek_v3", "qwen35", "qwen3next"])
def test_twelve_tokens_rolled_back_and_decoded_again_have_the_same_logits(model):
    """Of three sequences in one batch, at every distance from the edge of a block; a fourth one decodes beside them."""
    config = EngineConfig(model=str(GOLDEN / model), threads=2, ubatch_size=24, ctx_size=160, parallel=4)
    loaded = load_model(config, SingleWorld())
    try:
        engine = Engine(loaded.executable, Sampler(loaded.executable.vocab_size), max_rollback=16)
        process = engine.outputs.process
        logits: dict[tuple[int, int], list[bytes]] = defaultdict(list)  # of each sequence after each length

        def record(chunks, rows):
            for chunk in chunks:
                if chunk.samples:
                    place = chunk.sequence.id, chunk.sequence.length
                    logits[place].append(rows[chunk.row + chunk.rows - 1].tobytes())
            return process(chunks, rows)

        engine.outputs.process = record
        rng = np.random.default_rng(0)
        for id, length in enumerate((1, 16, 45, 30)):
            prompt = rng.integers(3, 180, length).tolist()
            engine.add(id, prompt, SamplingParams(max_tokens=70, temperature=0.7, seed=id, ignore_eos=True))
        sequences = [engine._sequences[id] for id in range(4)]
        done = set()
        while engine.has_work:
            engine.step()
            for sequence in sequences[:3]:
                place = sequence.id, len(sequence.output)
                if place[1] in (13, 26, 39, 52, 65) and place not in done:
                    done.add(place)
                    engine.scheduler.rollback(sequence, 12)
        again = sum(len(found) > 1 for found in logits.values())
        assert again == 3 * 5 * 12 and all(len(set(found)) == 1 for found in logits.values())
        assert all(len(found) == 1 for (id, _), found in logits.items() if id == 3)
    finally:
        loaded.close()
