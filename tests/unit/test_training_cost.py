"""Prices of training steps: more of anything is never slower, parts add up, and stages wait as 1F1B says."""

import dataclasses

import pytest

from ckdist.mesh import Mesh
from ckdist.models.registry import spec_from_config
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine_spec import machine_named
from ckdist.train.loss_program import lower_model, trace_model
from ckdist.train.stage import TrainingStage
from ckdist.train.training_answer import training_answers, training_meshes
from ckdist.train.training_step_cost import TrainingStepCost

SPEC = spec_from_config(
    {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_size": 64,
     "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4},
    "small",
)  # fmt: skip
MACHINE = dataclasses.replace(machine_named("xeon-8280"), nodes=1, sockets=1, between=0.0)


def cost(mesh: Mesh, machine=MACHINE, batches=1, recompute=True) -> TrainingStepCost:
    whole = trace_model(SPEC, mesh)
    stage = TrainingStage.of(mesh, whole, set(whole.weights), 1, batches)
    program = lower_model(SPEC, 64, "bfloat16", mesh, recompute=recompute, stage=stage)
    return TrainingStepCost(
        program,
        Cluster(machine, ranks=1, hosts=len(mesh.along("dp")) * len(mesh.along("pp")) * len(mesh.along("tp"))),
        64,
        recompute,
    )


def test_a_step_grows_with_its_tokens_and_with_what_is_computed_again():
    one = cost(Mesh.of_job(1, 0))
    assert one.step(32).total < one.step(64).total < one.step(128, 2).total < 2.01 * one.step(64).total
    assert cost(Mesh.of_job(1, 0), recompute=False).step(64).arithmetic < one.step(64).arithmetic


@pytest.mark.parametrize(
    "name",
    [
        "training",
        "training_attention",
        "training_elementwise",
        "training_packing",
        "training_optimizer",
        "bandwidth",
    ],
)
def test_a_better_machine_is_never_slower(name):
    low = dataclasses.replace(MACHINE, training_attention=1e9, training_elementwise=1e8)
    high = dataclasses.replace(low, **{name: 2 * getattr(low, name)}, core_bandwidth=2 * low.core_bandwidth)
    mesh = Mesh.of_job(1, 0)
    assert cost(mesh, high).step(64).total < cost(mesh, low).step(64).total


def test_attention_is_in_proportion_to_half_a_sequence_and_the_rest_of_it():
    whole, half = (dataclasses.replace(MACHINE, training_keys=keys) for keys in (32.0, 0.0))
    of = lambda machine: cost(Mesh.of_job(1, 0), machine)
    assert of(whole).stage_work[0][0].attention == 2 * of(half).stage_work[0][0].attention
    assert of(half).step(64).total < of(whole).step(64).total


def test_products_are_counted_by_hand():
    """Kaplan et al. 2020: 6 operations for each token and element; 8 where the layer is computed again."""
    work = cost(Mesh.of_job(1, 0)).stage_work[0][0]
    layers, head = 4 * (4 * 64 * 64 + 3 * 64 * 128), 512 * 64
    assert work.products == 8 * layers + 6 * head
    assert work.attention == 4.5 * 2 * 32 * 4 * 128
    assert (work.packed, work.gradients) == (12 * (layers + head), 8 * (layers + head))


def test_stages_wait_for_their_first_batch():
    """Each but the slowest for one batch: of stages that are alike (S - 1) / (M V) of what they compute, Narayanan et
    al. 2021 (arXiv:2104.04473).
    """
    of = lambda batches: cost(Mesh.of_job(2, 0, pp=2), batches=batches)
    one, two, four = (of(n).step(64 * n, n) for n in (1, 2, 4))
    each = [of(1)._batch(*stage, 64).total for stage in of(1).stage_work]
    assert one.latency == pytest.approx(min(each)) and two.total - one.total == pytest.approx(max(each))
    assert four.latency == pytest.approx(one.latency)


def test_every_rank_says_the_same_of_a_step_in_stages():
    """What other stages train is counted too."""
    first, second = (cost(Mesh.of_job(2, rank, pp=2), batches=2) for rank in range(2))
    assert [work.packed > 0 for work, _ in first.stage_work] == [True, True]
    assert first.stage_work == second.stage_work


def test_every_mesh_is_planned():
    cluster = Cluster(MACHINE, hosts=4)
    meshes = [str(mesh) for mesh in training_meshes(cluster, 4)]
    assert {"dp 4", "tp 4", "pp 4", "dp 2 x pp 2", "pp 2 x tp 2", "dp 2 x tp 2"} == set(meshes)
    found = training_answers(SPEC, cluster, 256, "full", batches=4)
    assert {str(one.mesh) for one in found} == set(meshes) - {"tp 4"}  # of two heads
    stages = next(one for one in found if str(one.mesh) == "pp 4")
    assert stages.tokens == 256 and stages.memory["trained weights"] < found[0].total
