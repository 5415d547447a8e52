"""Loads the draft model that --model-draft names, as a second model of the job: every rank holds a shard of it.

Every function but `check_vocabularies` is called by all ranks of a world together.
"""

import logging
from dataclasses import fields

import numpy as np

from ckdist import native
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.config.draft_config import MEMORY_SHARE
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.layer_drafter import MOST_ROWS
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.errors import CapacityError, ConfigError
from ckdist.hub.resolve import resolve
from ckdist.program.step_batch import Batch
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.predictor_weights import open_predictor
from ckdist.worker.colocation import Colocation

log = logging.getLogger(__name__)
MOST_SEQUENCES = 16  # a step with more drafts nothing
LAYER = {"batch_size": MOST_SEQUENCES * MOST_ROWS, "ubatch_size": MOST_SEQUENCES * MOST_ROWS}  # its largest step
# Settings of the large model that the draft model does not share.
OWN = {
    "model_draft": None, "spec": "off", "lora": (), "max_loras": 0, "override_kv": (), "quantize": None,
    "kv_memory": None, "cache_disk": None, "trace": None, "layout": None, "pipeline_parallel_size": 1,
    "prefill": "tensor", "experts": "tensor", "config": None, "speculative_config": None,
}  # fmt: skip


def load_draft_model(config: EngineConfig, target: Model) -> Model:
    """Loads the draft model of `target`, in the same threads.

    Raises ConfigError if it cannot draft, and the errors of `load_model`.
    """
    world, worker = target.world, target.executable.worker
    if not target.spec.generates or target.spec.encoder is not None:
        raise ConfigError(f"--model-draft is for decoders, and the model has an encoder ({target.spec.family})")
    if config.spec == "mtp":
        path = str(target.checkpoint.path)
        checkpoint = together(world, lambda: open_predictor(target.checkpoint))
    else:
        path = resolve(config.model_draft, world)
        checkpoint = together(world, lambda: open_checkpoint(path or ""))
    if world.rank == 0:
        checkpoint.warn(log)
    spec = checkpoint.spec
    if not spec.generates or spec.encoder is not None:
        raise ConfigError(f"--model-draft {path} has an encoder ({spec.family}): use a decoder")
    communicator = worker.communicator.split(0)
    assert communicator is not None  # the color is not negative
    context = min(target.plan.cache.context_length, spec.max_position)
    shared = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    own = EngineConfig(**{
        **shared, **OWN, "model": path, "ctx_size": context, "parallel": min(config.parallel, MOST_SEQUENCES),
        "memory": _memory(config, world), **(LAYER if spec.predicts else {}),
    })  # fmt: skip
    try:
        colocation = Colocation(worker, communicator, target.executable.model + 1)
        model = load_model(own, world, colocation=colocation, checkpoint=checkpoint)
    except CapacityError as error:
        flag = "--spec mtp" if spec.predicts else "--model-draft"
        raise CapacityError(f"{flag} {path}: {error}") from None
    if model.executable.state_slots:
        raise ConfigError(f"--model-draft {path} keeps states ({spec.family}), which cannot go back: use another model")
    model.executable.join()
    _warm(model)
    return model


def _warm(model: Model) -> None:
    """Runs two steps, since the first one packs weights."""
    executable = model.executable
    with model.loader.held():
        if model.world.rank:
            executable.work()
        else:
            for _ in range(2):
                one = np.zeros(1, np.int32)
                rows = np.zeros((1, executable.spec.hidden_size), np.float32) if model.spec.predicts else None
                executable.run(Batch(one, np.array([(1, 0, 1)], np.int32), one, one, embeddings=rows))
            executable.stop()
    executable.stats(reset=True)


def _memory(config: EngineConfig, world: World) -> int | None:
    """Most memory of this host, with the memory that the large model will still touch."""
    if config.memory is None:
        return None
    return config.memory // MEMORY_SHARE + native.lib.ckdist_promised_memory() * world.local_size


def check_vocabularies(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises ConfigError if two tokenizers have different tokens."""
    wanted, found = target.backend.get_vocab(), draft.backend.get_vocab()
    if wanted == found:
        return
    remedy = "use a draft model with the same tokenizer"
    if len(wanted) != len(found):
        raise ConfigError(
            f"--model-draft {path} has {len(found)} tokens in its vocabulary, and the model has {len(wanted)}: {remedy}"
        )
    names = {number: text for text, number in found.items()}
    number, text = min((number, text) for text, number in wanted.items() if found.get(text) != number)
    raise ConfigError(
        f"--model-draft {path}: its token {number} is {names.get(number, '')[:40]!r}, and the model's is "
        f"{text[:40]!r}: {remedy}"
    )
