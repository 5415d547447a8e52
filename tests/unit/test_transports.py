"""Which transport joins hosts: one rule for serving and training, and one check of MPI's thread level."""

from types import SimpleNamespace

import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.comm.transports import transport_choice
from ckdist.comm.transports.transport_choice import choose_transport
from ckdist.errors import ConfigError
from tests.support.thread_ranks import run_threads

LEVELS = {f"THREAD_{name}": level for level, name in enumerate(("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"))}


@pytest.mark.parametrize("level", ["THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED"])
def test_mpi_must_allow_calls_from_several_threads(level):
    mpi = SimpleNamespace(**LEVELS, Query_thread=lambda: LEVELS[level])
    world = SimpleNamespace(rank=0, size=1, hosts=("here",), mpi=mpi, gather=lambda value: [value])
    with pytest.raises(ConfigError, match=rf"thread level {LEVELS[level]}, and 3 \(MPI_THREAD_MULTIPLE\) is needed"):
        choose_transport(world, "mpi", 1.0)


def test_every_transport_is_tried_for_any_communicator(monkeypatch):
    """Serving and training alike: `auto` is the same everywhere."""
    tried, really = set(), transport_choice.open_transport

    def note(world, name, *more):
        tried.add(name)
        return really(world, name, *more)

    monkeypatch.setattr(transport_choice, "open_transport", note)
    kinds = run_threads("ab", lambda world: open_communicator(world, timeout=5, arena_bytes=1 << 22).transport)
    assert tried == {"verbs", "tcp"} and kinds == ["tcp", "tcp"]
