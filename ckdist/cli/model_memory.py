"""`python -m ckdist.cli.model_memory serve FLAGS`: predicts the memory of a model, before anything is loaded.

These are its weights, the cache and the rotations of a few whole contexts, and a reserve for each rank.
"""

import dataclasses
import logging
import sys

import msgspec

from ckdist.cli.arguments import parse_arguments
from ckdist.cli.command_ranks import wanted_ranks
from ckdist.cli.main import report
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.engine_sizes import engine_sizes
from ckdist.errors import CkdistError, UserError
from ckdist.layouts.memory_sizes import RESERVE
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.serve.predicted_memory import PredictedMemory

CONTEXTS = 4  # whole contexts in the cache of a model without a stated memory


def predicted(config: ServeConfig) -> PredictedMemory:
    """Returns the bytes of all ranks. Raises a UserError if the model cannot be served."""
    ranks = wanted_ranks(config)
    sizes = engine_sizes(dataclasses.replace(config, tensor_parallel_size=1, pipeline_parallel_size=1, layout=None))
    fixed = sizes.weights + sizes.states + ranks * RESERVE
    per_token = ranks * sizes.rope
    if config.kv_memory is None:
        per_token += CONTEXTS * -(-sizes.block // BLOCK_TOKENS)
    else:
        fixed += ranks * config.kv_memory
    return PredictedMemory(fixed, per_token, sizes.blocks * BLOCK_TOKENS)


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
