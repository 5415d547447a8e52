"""The mesh: every rank's place, the groups of an axis, and what is refused."""

import itertools
import math

import pytest

from ckdist.errors import ConfigError, LayoutError
from ckdist.mesh import AXES, Mesh
from tests.support.cases import cases

SIZES = itertools.product(range(1, 4), repeat=4)
MOST_RANKS = 24


@cases("dp, sp, pp, tp", [sizes for sizes in SIZES if math.prod(sizes) <= MOST_RANKS])
def test_every_rank_has_its_own_place(dp, sp, pp, tp):
    """Row-major: tp neighbours follow one another, and the groups of any axes are disjoint and cover all ranks."""
    ranks = dp * sp * pp * tp
    meshes = [Mesh.of_job(ranks, rank, sp=sp, pp=pp, tp=tp) for rank in range(ranks)]
    places = [tuple(mesh.index(axis) for axis in AXES) for mesh in meshes]
    assert places == list(itertools.product(range(dp), range(sp), range(pp), range(1), range(tp)))
    for count in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, count):
            groups = [tuple(mesh.group(*axes)) for mesh in meshes]
            assert sorted(itertools.chain(*set(groups))) == list(range(ranks))
            assert all(mesh.rank in group for mesh, group in zip(meshes, groups, strict=True))
    for axis in AXES:
        assert [m.group(axis) for m in meshes] == [[p.rank for p in m.along(axis)] for m in meshes]
    assert meshes[0].group("tp") == list(range(tp))


@pytest.mark.parametrize(
    "ranks, axes, message",
    [
        (6, {"dp": 2, "tp": 2}, "6 ranks cannot be a mesh of dp 2 x tp 2, which has 4: start 4 ranks"),
        (6, {"tp": 4}, "6 ranks cannot be a mesh of tp 4, which has 4: start a multiple of 4 ranks"),
        (2, {"tp": 3}, "2 ranks cannot be a mesh of tp 3, which has 3: start a multiple of 3 ranks"),
        (7, {"pp": 2, "tp": 2}, "7 ranks cannot be a mesh of pp 2 x tp 2, which has 4: start a multiple of 4 ranks"),
    ],
)
def test_axes_that_do_not_make_up_the_ranks_are_named(ranks, axes, message):
    with pytest.raises(ConfigError, match=message):
        Mesh.of_job(ranks, 0, **axes)


def test_a_mesh_in_words():
    assert str(Mesh.of_job(6, 4, tp=3)) == "dp 2 x tp 3" and str(Mesh.of_job(1, 0)) == "one rank"


class Ranks:
    """A communicator of so many ranks that notes how it is split."""

    def __init__(self, size):
        self.size = size

    def split(self, color, key=-1):
        return color, key


def test_splits_ask_for_groups_and_not_for_more():
    world = Ranks(6)
    mesh = Mesh.of_job(6, 4, tp=3)  # dp 1, tp 1
    assert mesh.split(world, "tp") == (3, 4) and mesh.split(world, "dp") == (1, 4)
    assert mesh.split(world, "dp", "tp") is world and mesh.split(world, "pp") is None
    with pytest.raises(LayoutError, match=r"the mesh has 6 ranks \(dp 2 x tp 3\), and its communicator has 4"):
        mesh.split(Ranks(4), "tp")
