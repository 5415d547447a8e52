"""What training steps reach of a machine's products, attention and row steps, by a small model that is made up here
and in no catalogue.
"""

import dataclasses
import statistics
from collections.abc import Callable

import numpy as np

from ckdist.mesh import Mesh
from ckdist.models.registry import spec_from_config
from ckdist.models.spec import ModelSpec
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine import MachineSpec
from ckdist.program.pool import ThreadPool
from ckdist.topology import this_machine
from ckdist.topology.bandwidth import node_cpus
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import LossProgram, lower_model
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.ranks import TrainingRanks
from ckdist.train.step_cost import ATTENTION_KINDS, PRODUCT_KINDS, WAITING_KINDS, TrainingStepCost
from ckdist.weights.dtypes import BF16

SHAPE = {
    "model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "hidden_size": 640, "intermediate_size": 1792, "num_attention_heads": 10, "num_key_value_heads": 10,
    "num_hidden_layers": 4, "head_dim": 64,
}  # fmt: skip
LENGTH, SEQUENCES = 256, 2
TURNS = 3
LEAST_SECONDS = 1e-6
HIGHEST, LOWEST = 4.0, 0.01  # of the share of a product's rate

Load = Callable[[str], np.ndarray]


def random_weights(program: LossProgram, seed: int = 0) -> Load:
    """First values of a model: ones for norms, else at random."""
    shapes, rng = program.shards.whole_shapes, np.random.default_rng(seed)

    def load(name: str) -> np.ndarray:
        """Of one weight, float32."""
        shape = shapes[name]
        return 0.02 * rng.standard_normal(shape, np.float32) if len(shape) > 1 else np.ones(shape, np.float32)

    return load


def random_batch(spec: ModelSpec, length: int, sequences: int, seed: int = 0) -> PackedBatch:
    """So many sequences of tokens at random, each of which is to be predicted."""
    ids = np.random.default_rng(seed).integers(0, spec.vocab_size, length * sequences + 1).astype(np.int32)
    return PackedBatch(ids[:-1], ids[1:], np.arange(0, length * sequences + 1, length, dtype=np.int32))


def with_training(machine: MachineSpec) -> MachineSpec:
    """The machine with what a training in bfloat16 reaches on all its cores."""
    tokens, spec = LENGTH * SEQUENCES, spec_from_config(SHAPE, "the model that is made up")
    program = lower_model(spec, tokens, "bfloat16", Mesh.of_job(1, 0))
    cpus = [cpu for node in node_cpus(this_machine()).values() for cpu in node]
    executable = NativeExecutable(
        program, random_weights(program), ThreadPool(len(cpus), cpus), TrainingRanks(program.shards.mesh)
    )
    batch, turns = random_batch(spec, LENGTH, SEQUENCES), []
    try:
        for _ in range(TURNS + 1):
            executable.zero_grad()
            executable.forward_backward(batch, False)
            turns.append(executable.times())
    finally:
        executable.close()
    found = {kind: statistics.median(times[kind] for times in turns[1:]) for kind in turns[0]}
    cost = TrainingStepCost(program, Cluster(machine, ranks=1), LENGTH, recompute=False)
    return fitted(machine, cost, tokens, found)


def fitted(machine: MachineSpec, cost: TrainingStepCost, tokens: int, found: dict[str, float]) -> MachineSpec:
    """The machine with the figures for which a batch of so many tokens takes `found`, seconds by kind of step."""
    (work, _), threads = cost.stage_work[0], cost.threads
    products = sum(found[kind] for kind in PRODUCT_KINDS)
    attention = sum(found[kind] for kind in ATTENTION_KINDS)
    rest = sum(found.values()) - products - attention - sum(found[kind] for kind in WAITING_KINDS)
    products -= work.weights / machine.read_rate(threads)
    per_second = lambda amount, seconds: tokens * amount / max(seconds, LEAST_SECONDS) / threads
    share = per_second(work.products, products) / machine.product_rate(BF16.name, 1, tokens)
    return dataclasses.replace(
        machine,
        training=min(HIGHEST, max(LOWEST, share)),
        training_attention=per_second(work.attention, attention),
        training_elementwise=per_second(work.elements, rest),
    )


__all__ = ["fitted", "random_batch", "random_weights", "with_training"]
