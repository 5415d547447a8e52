import inspect
from itertools import combinations, product

import pytest

from tests.support.cases import cases
from tests.support.pairs import covering, pairs


@pytest.mark.parametrize("sizes, most", [([25, 7, 5], 175), ([6, 29, 3], 174), ([3, 4, 5, 2, 3], 24), ([2, 1], 2)])
def test_every_pair_occurs_and_rows_are_few(sizes, most):
    rows = covering(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(rows) == len(set(rows)) <= most and rows == covering(sizes)


def test_a_factor_of_several_names_has_tuples():
    mark = pairs({"a, b": [(1, 2), (3, 4)], "c": ["x"]}).mark
    assert mark.args == ("a, b, c", [[1, 2, "x"], [3, 4, "x"]])


def test_a_case_that_fails_is_named_and_fixtures_are_those_of_the_test(request):
    seen = []

    @cases("a, b", [(1, 2), (3, 4), (5, 6)])
    def fails(request, a, b):
        seen.append((request, a, b))
        assert a != 3

    assert list(inspect.signature(fails).parameters) == ["request"]
    with pytest.raises(AssertionError, match=r"a=3, b=4"):
        fails(request=request)
    assert seen == [(request, 1, 2), (request, 3, 4)]
