"""The memory of an engine on one rank, from its lowered programs, before anything is loaded."""

import functools
from dataclasses import dataclass

from ckdist import native
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import open_adapter, open_model, open_slots
from ckdist.engine.rank_steps import lower_programs
from ckdist.engine.rank_weights import RankWeights
from ckdist.engine.stage_layers import layers_of_stages
from ckdist.engine.stage_programs import trace_programs
from ckdist.engine.stage_ranks import stage_rank
from ckdist.layouts.rank_plan import step_tokens, wanted_context
from ckdist.program.cache import block_bytes, slot_bytes
from ckdist.program.rotations import rope_bytes_per_position
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.program.tracer import Tracer
from ckdist.weights.loader import ShardLoader


@dataclass(frozen=True)
class EngineSizes:
    """Bytes of an engine's parts.

    Attributes:
        weights: All weights.
        states: The states of all sequences.
        block: Keys and values of BLOCK_TOKENS tokens.
        rope: Rotations of one position.
        context: Most tokens of a sequence.
    """

    weights: int
    states: int
    block: int
    rope: int
    context: int

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.context // BLOCK_TOKENS)


def engine_sizes(config: EngineConfig) -> EngineSizes:
    """Returns the bytes of all ranks' parts together. Raises a UserError if the model cannot be served."""
    world = SingleWorld()
    checkpoint = open_model(config, world, embeddings=True)
    spec = checkpoint.spec
    _, adapter, _ = open_adapter(config, world, checkpoint)
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
    caches = {layer: cache for lowered in own for layer, cache in lowered.caches.items()}.values()
    return EngineSizes(
        weights=weights.sizes().total,
        states=2 * (config.parallel + 1) * slot_bytes(caches),
        block=native.lib.ckdist_block_stride(block_bytes(caches, (config.cache_type_k, config.cache_type_v))),
        rope=rope_bytes_per_position(spec),
        context=wanted_context(config, spec),
    )
