"""Two models in one job: the second is loaded beside steps of the first, and the first unloaded beside those of it."""

import gc

import pytest

from ckdist import native
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from tests.support.launcher import run_ranks


@pytest.mark.parametrize("ranks, transport, stages", [(1, "auto", 1), (2, "auto", 1), (2, "mpi", 1), (2, "tcp", 2)])
def test_both_have_the_bits_that_each_has_alone(ranks, transport, stages):
    done = run_ranks(ranks, "-m", "tests.support.programs.two_models", transport, str(stages))
    assert done.returncode == 0 and "two models" in done.stdout, done.stdout + done.stderr


def test_a_cache_that_is_not_touched_yet_is_no_free_memory():
    gc.collect()  # models of earlier tests, which would give their memory back meanwhile
    before, size = native.lib.ckdist_promised_memory(), 64 << 20
    model = load_model(EngineConfig(threads=1, kv_memory=size, repack="off"), SingleWorld())
    promised = native.lib.ckdist_promised_memory() - before
    model.close()
    assert 0.9 * size < promised < 1.1 * size
    assert native.lib.ckdist_promised_memory() == before
