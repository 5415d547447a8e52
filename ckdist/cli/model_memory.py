"""`python -m ckdist.cli.model_memory serve FLAGS`: predicts the memory of a model, before anything is loaded.

These are its weights, the cache and the rotations of a few whole contexts, and a reserve for each rank.
"""

import dataclasses
import functools
import logging
import sys

import msgspec

from ckdist.cli.arguments import parse_arguments
from ckdist.cli.command_ranks import wanted_ranks
from ckdist.cli.main import report
from ckdist.comm.world import SingleWorld
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.load_model import open_adapter, open_model, open_slots
from ckdist.engine.rank_steps import lower_programs
from ckdist.engine.rank_weights import RankWeights
from ckdist.engine.stage_layers import layers_of_stages
from ckdist.engine.stage_programs import trace_programs
from ckdist.engine.stage_ranks import stage_rank
from ckdist.errors import CkdistError, UserError
from ckdist.layouts.memory_sizes import RESERVE
from ckdist.layouts.rank_plan import step_tokens, wanted_context
from ckdist.program.cache import block_bytes, slot_bytes
from ckdist.program.rotations import rope_bytes_per_position
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.program.tracer import Tracer
from ckdist.serve.predicted_memory import PredictedMemory
from ckdist.weights.loader import ShardLoader

CONTEXTS = 4  # whole contexts in the cache of a model without a stated memory


def predicted(config: ServeConfig) -> PredictedMemory:
    """Returns the bytes of all ranks. Raises a UserError if the model cannot be served."""
    ranks = wanted_ranks(config)
    config = dataclasses.replace(config, tensor_parallel_size=1, pipeline_parallel_size=1, layout=None)
    world = SingleWorld()
    checkpoint = open_model(config, world, embeddings=True)
    spec = checkpoint.spec
    adapter, _ = open_adapter(config, world, checkpoint)
    slots = open_slots(config, checkpoint)
    tracer = functools.partial(Tracer, low_rank=adapter.low_rank) if adapter else Tracer
    loader = ShardLoader(checkpoint, 1, config.quantize)
    rank = stage_rank(world, layers_of_stages(config, world, loader, tracer))
    programs = trace_programs(config, world, rank, spec, adapter, slots, tracer, True)
    steps = lower_programs(programs, loader, step_tokens(config, spec), False, config.adapter_slots)
    weights = RankWeights(loader, adapter or slots)
    adapted = [lowered for lowered in steps.main if lowered.adapters]
    own = [steps.main[0], *adapted, *(steps.hidden if spec.encoder else [])]
    for lowered in own:
        weights.add(lowered)
    caches = [cache for lowered in own for cache in lowered.caches.values()]
    context, types = wanted_context(config, spec), (config.cache_type_k, config.cache_type_v)
    fixed = weights.sizes().total + 2 * (config.parallel + 1) * slot_bytes(caches) + ranks * RESERVE
    per_token = ranks * rope_bytes_per_position(spec)
    if config.kv_memory is None:
        per_token += CONTEXTS * -(-block_bytes(caches, types) // BLOCK_TOKENS)
    else:
        fixed += ranks * config.kv_memory
    return PredictedMemory(fixed, per_token, -(-context // BLOCK_TOKENS) * BLOCK_TOKENS)


def main() -> int:
    """Prints the prediction as JSON. Returns the exit code."""
    logging.basicConfig(level=logging.ERROR)
    try:
        prediction = predicted(parse_arguments(ServeConfig, sys.argv[2:], "ckdist serve"))
        print(msgspec.json.encode(prediction).decode())
    except CkdistError as error:
        report(error, None)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
