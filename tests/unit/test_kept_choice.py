"""A choice of a job's first start, which its restarts take over."""

from types import SimpleNamespace

from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.engine.kept_choice import kept_choice


def test_a_restart_takes_over_the_choice_of_the_first_start(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(AGAIN, raising=False)
    world = lambda *hosts: SimpleNamespace(rank=0, hosts=list(hosts), broadcast=lambda value: value)
    choices = iter([[1], [2], [3], [4]])
    choose = lambda: next(choices)
    assert [kept_choice(world("a", "b"), "layout", ["m", None], choose) for _ in range(2)] == [[1], [2]]
    monkeypatch.setenv(AGAIN, "1")
    assert kept_choice(world("a", "b"), "layout", ["m", None], choose) == [2]
    assert kept_choice(world("a"), "layout", ["m", None], choose) == [3]  # another host took over, or none
