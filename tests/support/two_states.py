"""Models whose weights are packed so far and no further."""

from pathlib import Path

import numpy as np

from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from tests.support.distinct_families import prefill_of
from tests.support.paths import GOLDEN

TYPES = sorted(GOLDEN.glob("gguf/*.gguf"))
BEFORE = None  # in place of a share: everything is packed before anything runs
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 2000,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 3001,
    "tie_word_embeddings": False,
}


def loaded(world, path, until, threads=1, parallel=2):
    """The model with a repacker that ends for good where the share `until` of the bytes is packed."""
    config = EngineConfig(
        model=str(path),
        threads=threads,
        ubatch_size=32,
        ctx_size=96,
        parallel=parallel,
        cache_type_k="f32",
        cache_type_v="f32",
        prefill=prefill_of(Path(path)) if world.size > 1 else "auto",
        repack="off" if until is BEFORE else "threads",
    )
    if until is BEFORE:
        return load_model(config, world)
    return load_model(config, world, fill=lambda loader: loader.repack(until))


def logits(world, path, until, threads=1, settled=True):
    """What `situations` gives on rank 0, and how far every rank's weights were packed before and after.

    `settled`: nothing is packed meanwhile.
    """
    model = loaded(world, path, until, threads)
    if settled:
        model.loader.wait()
    world.gather(None)
    before, result = model.loader.filled, None
    if world.rank == 0:
        result = situations(model.executable)
        model.executable.stop()
    else:
        model.executable.work()
    if until in (BEFORE, 1.0):
        model.loader.wait()
    world.gather(None)
    after = model.loader.filled
    model.executable.close()
    model.loader.close()
    return result, before, after


def situations(executable) -> list[np.ndarray]:
    """Logits of a prompt by token-parallel prefill, of the same by tensor-parallel, and of single tokens after it."""
    found, ids = [], np.arange(48) % 40 + 3
    for executable.prefill_from in (0, 1 << 30):
        sequence = SingleSequence(executable)
        found.append(sequence.feed(ids))
        found += [sequence.feed([token]).copy() for token in (3, 4, 5)]
    return found
