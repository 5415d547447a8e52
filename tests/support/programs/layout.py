"""A rank that says which layout `--layout auto` would take for a model of 0.6 billion weights, which are not there."""

import sys

from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.layouts.layout_choice import choose_layout
from ckdist.weights.described import describe_config

MODEL = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip

world = start_world()
choice = choose_layout(world, EngineConfig(model="described", threads=1), describe_config(MODEL, "config.json", "Q4_K"))
print(f"rank {world.rank} chose {choice.stages} stages: {choice.reason}")
sys.stdout.flush()
world.close()
