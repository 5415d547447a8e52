"""Parameters of a test in pairs instead of all combinations."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(factors: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test by `paired`."""
    return pytest.mark.parametrize(*paired(factors))


def paired(factors: Mapping[str, Iterable[Any]]) -> tuple[str, list[list[Any]]]:
    """Names and cases in which every two values of different factors occur together at least once.

    Args:
        factors: The values of each factor. As in `pytest.mark.parametrize`, a factor "a, b" has tuples as values.
    """
    columns = [[value if "," in name else (value,) for value in values] for name, values in factors.items()]
    rows = covering([len(column) for column in columns])
    cases = [[x for column, i in zip(columns, row, strict=True) for x in column[i]] for row in rows]
    return ", ".join(factors), cases


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of one index per factor that contain every pair of indices of two factors.

    Greedy: each row starts from a pair that is still missing and takes as many other missing pairs as it can.

    Args:
        sizes: Number of values of each of at least two factors.
    """
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while missing:
        chosen = dict(min(missing))
        for factor in range(len(sizes)):
            if factor not in chosen:
                gains = [
                    sum(tuple(sorted([(factor, i), cell])) in missing for cell in chosen.items())
                    for i in range(sizes[factor])
                ]
                # Among equals the values take turns.
                turns = [(i - len(rows)) % sizes[factor] for i in range(sizes[factor])]
                chosen[factor] = max(range(sizes[factor]), key=lambda i: (gains[i], -turns[i]))
        row = sorted(chosen.items())
        missing -= set(combinations(row, 2))
        rows.append(tuple(index for _, index in row))
    return rows
