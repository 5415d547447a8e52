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


def test_a_home_that_cannot_be_written_measures_once_too(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    measured = iter([5e9, 9e9])
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda *_: next(measured))
    monkeypatch.setattr(bandwidth, "times_preempted", lambda: 0)
    placement = types.SimpleNamespace(cpus=(0,), memory=())
    assert [bandwidth.rank_bandwidths(SingleWorld(), placement, 1)[0] for _ in range(3)] == [5e9] * 3
    (folder,) = tmp_path.glob("ckdist-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)  # others may have put something there
    assert bandwidth.rank_bandwidths(SingleWorld(), placement, 1)[0] == 9e9
