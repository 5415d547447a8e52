"""The one rule that shards dimensions, and the placement rules that refuse a forward without its collectives."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckdist.errors import LayoutError
from ckdist.layout import SINGLE, TENSOR, Layout, Sharding, even_ranges
from ckdist.mesh import Mesh
from ckdist.program.tracer import Tracer, trace
from tests.support.specs import dims, spec


@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 64))
def test_cut_covers_everything_evenly(size, parts, unit):
    ranges = even_ranges(size, parts, unit)
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(begin % unit == 0 for begin, end in ranges if begin < end)
    units = [-(-(end - begin) // unit) for begin, end in ranges]
    assert max(units) - min(units) <= 1
    assert size == 0 or ranges[0][1] > 0  # rank 0 is never the empty one


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 20))
def test_every_query_head_finds_its_kv_head(kv_heads, group, parts):
    covered = []
    for rank in range(parts):
        mesh = Mesh({"tp": parts}, rank)
        heads, keys = Sharding(TENSOR, mesh).heads(kv_heads * group, kv_heads, 16)
        begin, end = heads.share(mesh)
        first, last = keys.share(mesh)
        covered += range(begin, end)
        needed = {h // group for h in range(begin, end)}
        assert needed == set(range(first, last))  # all that it needs, and nothing more
    assert covered == list(range(kv_heads * group))


def test_an_unknown_axis_names_the_known_ones():
    with pytest.raises(LayoutError, match=r"'ep'.*only tp"):
        Sharding(Layout("BAD", {"ffn": "ep"}), Mesh({"tp": 2})).ffn(64)


def test_a_missing_reduce_is_an_error_while_tracing():
    s, mesh = spec(), Mesh({"tp": 2})

    def forgets(g, ids, spec):
        hidden, ffn = g.sharding.hidden(64), g.sharding.ffn(176)
        x = g.reduce(g.embed(ids, g.weight("table", g.sharding.vocab(100), hidden)))
        a = g.linear(g.linear(x, g.weight("up", ffn, hidden)), g.weight("down", hidden, ffn))
        return g.add(x, a)

    with pytest.raises(LayoutError, match=r"partial over tp: wrap it in g.reduce\(\)"):
        trace(forgets, s, TENSOR, mesh)
    trace(forgets, s, SINGLE, Mesh({"tp": 1}))  # nothing is partial where nothing is cut


def test_dimensions_that_do_not_meet_are_named():
    g = Tracer(TENSOR, Mesh({"tp": 2}))
    d = dims(g, spec())
    from ckdist.program.program import Value

    x = Value("x", (d["tokens"], d["hidden"]))
    with pytest.raises(LayoutError, match=r"hidden=64.*ffn=176"):
        g.linear(x, g.weight("down", d["hidden"], d["ffn"]))
