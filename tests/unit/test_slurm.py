"""srun's variables as a world without MPI reads them."""

import pytest

from ckdist.comm.bootstrap import tcp_world
from ckdist.comm.bootstrap.slurm import first_node, step_variables
from ckdist.errors import ConfigError

STEP = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_ID": "1234"}


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node1", "node1"),
        ("node[07-09,12],login1", "node07"),
        ("a,b", "a"),
        ("r[1-2]n[3,5]", "r1n3"),
        ("gpu-[003]-x.y,b", "gpu-003-x.y"),
    ],
)
def test_the_first_node(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["node[", "node[a-b]", "$(x)", "[]", ",a"])
def test_what_is_no_list_of_nodes(nodes):
    with pytest.raises(ConfigError, match="is no list of nodes"):
        first_node(nodes)


def test_a_task_of_a_step_and_a_batch_script():
    told = step_variables(STEP)
    assert told == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": str(20000 + 16 * 1234 % 10000),
    }
    assert step_variables({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != told["MASTER_PORT"]
    assert step_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[07-08]"}) == {}


def test_torchruns_variables_go_before_sruns(monkeypatch):
    for name in (*tcp_world.VARIABLES, *STEP):
        monkeypatch.delenv(name, raising=False)
    assert not tcp_world.is_started()
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert tcp_world.is_started() and tcp_world.rank_variables()["MASTER_ADDR"] == "node07"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert tcp_world.rank_variables() == {**step_variables(STEP), "MASTER_ADDR": "10.0.0.1"}
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert not tcp_world.is_started()
