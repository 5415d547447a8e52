"""How fast ranks read memory is measured until a start is quiet, three times at most."""

import types

import pytest

from ckdist.comm.world import SingleWorld
from ckdist.topology import bandwidth


@pytest.mark.parametrize(
    "rates, disturbed, told",
    [
        ([5e9, 9e9], [False, False], [5e9, 5e9]),
        ([5e9, 4e9, 9e9], [True, False, False], [5e9, 5e9, 5e9]),
        ([5e9, 7e9, 6e9, 9e9], [True, True, True, False], [5e9, 7e9, 7e9, 7e9]),
    ],
    ids=["quiet", "quiet at last", "never quiet"],
)
def test_the_best_of_the_starts_is_kept(tmp_path, monkeypatch, rates, disturbed, told):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured, preempted = iter(rates), iter(n for start in disturbed for n in (0, int(start)))
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda *_: next(measured))
    monkeypatch.setattr(bandwidth, "times_preempted", lambda: next(preempted))
    placement = types.SimpleNamespace(cpus=(0,), memory=())
    assert [bandwidth.rank_bandwidths(SingleWorld(), placement, 1)[0] for _ in told] == told
